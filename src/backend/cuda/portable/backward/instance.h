// A backward kernel as the table of CMakeLists.txt makes it: what it takes, and how it is launched.
#pragma once

#include <cuda_runtime_api.h>

#include "backend/cuda/portable/backward/arguments.h"
#include "backend/cuda/portable/backward/config.h"
#include "fovea/tensor.h"

namespace fovea::cuda {

struct BackwardKernel {
  DType dtype;
  BackwardConfig config;    // of the two kernels
  BackwardConfig one_pass;  // of the pass that does all, where there is one
  // All kernels of a backward pass, in order.
  cudaError_t (*launch)(const BackwardArguments& a, cudaStream_t stream);
};

}  // namespace fovea::cuda
