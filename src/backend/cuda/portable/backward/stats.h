// What backward needs of every query row before it starts: delta and lse in log2 units. And the
// gradient of the sink, which needs nothing else.
#pragma once

#include <cuda_runtime_api.h>

#include "backend/cuda/portable/backward/arguments.h"

namespace fovea::cuda {

// Zeroes the sums of gradients besides. T: of out and dout; float, ptx::TensorFloat, __half or
// __nv_bfloat16.
template <typename T>
cudaError_t row_stats(const BackwardArguments& a, cudaStream_t stream);

cudaError_t sink_gradient(const BackwardArguments& a, cudaStream_t stream);

}  // namespace fovea::cuda
