// A Hopper backward kernel as the table of CMakeLists.txt makes it: what it takes, and how it is
// launched.
#pragma once

#include <cuda_runtime_api.h>

#include "backend/cuda/hopper/backward/arguments.h"
#include "backend/cuda/hopper/backward/config.h"
#include "fovea/tensor.h"

namespace fovea::cuda::hopper {

struct BackwardKernel {
  DType dtype;
  BackwardConfig config;
  // All kernels of a backward pass, in order.
  cudaError_t (*launch)(const BackwardArguments& a, cudaStream_t stream);
};

}  // namespace fovea::cuda::hopper
