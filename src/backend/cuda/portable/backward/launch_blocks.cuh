// Launching of blocks of a backward kernel.
#pragma once

#include "backend/cuda/common/launch.cuh"
#include "backend/cuda/portable/backward/arguments.h"

namespace fovea::cuda {

template <auto kKernel, typename... Rest>
cudaError_t launch_blocks(int64_t blocks, int threads, int shared_bytes, cudaStream_t stream,
                          const BackwardArguments& a, Rest... rest) {
  if (blocks == 0) return cudaSuccess;
  return launch<kKernel>({dim3(static_cast<unsigned>(blocks)), threads, shared_bytes, stream}, a,
                         rest...);
}

}  // namespace fovea::cuda
