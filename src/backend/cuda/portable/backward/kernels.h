// The backward kernels of this build, one entry per instance of the table in CMakeLists.txt.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

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

std::span<const BackwardKernel* const> backward_kernels();

}  // namespace fovea::cuda
