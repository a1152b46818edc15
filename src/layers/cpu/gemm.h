// A matrix product as the layers need it: plain values that code compiled per instruction set can
// take.
//
//   c[b][m][n] (+)= scale * (sum over t < blocks, k < depth of a[b][m][t][k] * w[t][k][n]) +
//   bias[n]
//
// The contraction has two levels: taps of a convolution and its channels, or batch members and
// their rows where a weight's gradient sums over both. Strides are in elements.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fovea::layers::cpu {

struct GemmLeft {
  const void* data = nullptr;
  int64_t batch = 0, row = 0, block = 0, depth = 1;  // strides
};

struct GemmRight {
  const void* data = nullptr;
  int64_t block = 0, depth = 0, col = 1;  // strides
};

struct Gemm {
  int64_t batch = 1, rows = 0, cols = 0, blocks = 1, depth = 0;
  GemmLeft a;
  GemmRight b;
  void* c = nullptr;
  int64_t c_batch = 0, c_row = 0, c_col = 1;  // strides
  double scale = 1;
  const void* bias = nullptr;  // [cols]
  bool add = false;            // to what c holds
};

// Memory of a product: some that its workers share, and some of each worker's own.
struct GemmScratch {
  std::byte* shared = nullptr;
  std::byte* workers = nullptr;
  int64_t worker_bytes = 0;  // from one worker's to the next
};

}  // namespace fovea::layers::cpu
