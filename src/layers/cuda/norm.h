// RMS and layer norm over the channels of a head, and their gradients.
#pragma once

#include <cuda_runtime_api.h>

#include "fovea/layers.h"
#include "layers/cuda/head_rows.h"

namespace fovea::layers::cuda {

struct NormArguments {
  QkNorm kind = QkNorm::kRms;
  float eps = 0;
  bool wide = false;  // 16 bytes at once
  HeadRows x, y;
  const void* weight = nullptr;  // [dim], or null: 1
  const void* bias = nullptr;    // [dim], or null: 0
};

struct NormBackwardArguments {
  NormArguments of;       // y is not read
  HeadRows dy, dx;        // may be the same memory
  float* sums = nullptr;  // [parts, 2, dim] of dweight and dbias, or null where neither is wanted
  int parts = 1;
};

// The most channels whose weight can have a gradient: a warp's sums lie in shared memory, of which
// every block has 32 KiB without asking.
constexpr int64_t kMostNormChannels = 32 * 1024 / (2 * sizeof(float));

cudaError_t launch_norm(const NormArguments& a, DType dtype, cudaStream_t stream);
// Every part's sums are written.
cudaError_t launch_norm_backward(const NormBackwardArguments& a, DType dtype, cudaStream_t stream);

}  // namespace fovea::layers::cuda
