// A Hopper forward kernel as the table of CMakeLists.txt makes it: what it takes, and how it is
// launched.
#pragma once

#include <cuda_runtime_api.h>

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

}  // namespace fovea::cuda::hopper
