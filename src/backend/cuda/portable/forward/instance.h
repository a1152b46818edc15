// A forward kernel as the table of CMakeLists.txt makes it: what it takes, and how it is launched.
#pragma once

#include <cuda_runtime_api.h>

#include "backend/cuda/portable/arguments.h"
#include "backend/cuda/portable/forward/config.h"
#include "fovea/tensor.h"

namespace fovea::cuda {

struct ForwardKernel {
  DType dtype;
  ForwardConfig config;
  // One block per (tile of rows, KV head) and part of the keys.
  cudaError_t (*launch)(const ForwardArguments& a, int64_t blocks, cudaStream_t stream);
  cudaError_t (*merge)(const MergePartsArguments& a, cudaStream_t stream);
};

}  // namespace fovea::cuda
