// Launching of one forward kernel.
#pragma once

#include "backend/cuda/hopper/forward/kernel.cuh"
#include "backend/cuda/hopper/forward/kernels.h"

namespace fovea::cuda::hopper {

template <typename Shape>
cudaError_t launch_forward(const ForwardArguments& a, int blocks, cudaStream_t stream) {
  const auto kernel = forward_kernel<Shape>;
  constexpr int kBytes = sizeof(Shared<Shape>);
  static_assert(kBytes <= kMostSharedBytes);
  if (const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      error != cudaSuccess) {
    return error;
  }
  kernel<<<blocks, Shape::kConfig.threads(), kBytes, stream>>>(a);
  return cudaGetLastError();
}

template <DType kDtype, typename Shape>
inline constexpr ForwardKernel kForwardKernel = {kDtype, Shape::kConfig, launch_forward<Shape>};

}  // namespace fovea::cuda::hopper
