// CCGQA's prologue on the GPU, in bf16 and f16 on tensor cores and in f32 by exact multiply-adds.
//
// Head dims are multiples of 8 up to 256, and tensors other than weights begin, as their rows do,
// on 16 bytes; other calls give cudaErrorInvalidValue. Nothing is allocated or waited for, sums
// have a fixed order, and a CUDA graph may capture it all.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "fovea/plan.h"
#include "layers/ccgqa_prologue.h"

namespace fovea::layers::cuda {

class SideStream;

// A rotation, and its angles at the first positions; those of others are computed as they come.
struct RopeTable {
  int64_t turning = 0;  // channels of a head, the first ones; 0: none turn
  RopeStyle style = RopeStyle::kHalf;
  double base = 10000;
  const float* angles = nullptr;  // [positions, 2, turning / 2]: cos of all pairs, then sin
  int64_t positions = 0;
};

// The gradient of weights that mix all channels, as products of matrices:
//   to[tap][o][i] = sum over r < rows of dy[r][o] * x[r + tap][i]
struct DenseGradient {
  const void *dy = nullptr, *x = nullptr;
  int64_t row = 0;  // from a row of either to the next
  int64_t rows = 0;
  int channels = 0, taps = 0;
  float* to = nullptr;
};

// Who makes them faster than this folder's kernels.
class DenseGradients {
 public:
  virtual ~DenseGradients() = default;
  virtual cudaError_t add(const DenseGradient& gradient, cudaStream_t stream) const = 0;
  virtual size_t scratch_bytes(const DenseGradient& gradient) const = 0;  // by its sizes
};

// What p.work is to be, on the current device. Only sizes of `p` and its toggles count; with
// `dense`, backward is always called with it, and with a dmixed whose rows lie as u's do and are
// room for zeros between the members of a batch.
PrologueNeeds prologue_needs(const Prologue& p, const RopeTable& rope, Pass pass,
                             const DenseGradients* dense = nullptr);
// The memory that `dense` may take, one product after another.
Scratch scratch_of_dense(const PrologueWork& work);

cudaError_t prologue(const Prologue& p, const RopeTable& rope, cudaStream_t stream);

// Whether a pass is that of tiles (tile_forward.cuh, tile_backward.cuh), on the current device.
bool prologue_goes_by_tiles(const Prologue& p, const RopeTable& rope, Pass pass);

// g.dmixed and g.du need no zeros in the rows before and after those of the tokens. Gradients of
// weights may come on a side stream, where one is given.
cudaError_t prologue_backward(const Prologue& p, const PrologueGradients& g, const RopeTable& rope,
                              cudaStream_t stream, const DenseGradients* dense = nullptr,
                              const SideStream* side = nullptr);

}  // namespace fovea::layers::cuda
