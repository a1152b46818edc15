// What a backward pass may need besides its one pass. Nothing of it adds to what others add to, so
// that it goes through the compiler once for all architectures, in files of its own.
#pragma once

#include <cuda_runtime_api.h>

#include "backend/cuda/portable/backward/arguments.h"

namespace fovea::cuda {

// dk and dv by blocks of keys, then dq by blocks of rows (two_kernels.cuh).
template <typename Shape>
cudaError_t launch_two_kernels(const BackwardArguments& a, cudaStream_t stream);

// dbias (bias.cuh). T as in row_stats.
template <typename T, int kDimQk, int kDimV>
cudaError_t bias_gradient(const BackwardArguments& a, cudaStream_t stream);

}  // namespace fovea::cuda
