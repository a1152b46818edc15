// The Hopper forward kernels of this build, one entry per instance of the table in CMakeLists.txt.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "backend/cuda/hopper/forward/arguments.h"
#include "backend/cuda/hopper/forward/config.h"
#include "fovea/tensor.h"

namespace fovea::cuda::hopper {

struct ForwardKernel {
  DType dtype;
  ForwardConfig config;
  cudaError_t (*launch)(const ForwardArguments& a, int blocks, cudaStream_t stream);
  cudaError_t (*merge)(const MergePartsArguments& a, cudaStream_t stream);
};

std::span<const ForwardKernel* const> forward_kernels();

}  // namespace fovea::cuda::hopper
