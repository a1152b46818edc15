// Launching of one forward kernel.
#pragma once

#include "backend/cuda/common/merge_parts.cuh"
#include "backend/cuda/hopper/forward/kernel.cuh"
#include "backend/cuda/hopper/forward/kernels.h"

namespace fovea::cuda::hopper {

template <typename Shape>
cudaError_t launch_forward(const ForwardArguments& a, int blocks, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Shared<Shape>);
  static_assert(kBytes <= kMostSharedBytes);
  return launch<forward_kernel<Shape>>(
      {dim3(static_cast<unsigned>(blocks)), Shape::kConfig.threads(), kBytes, stream}, a);
}

template <DType kDtype, typename Shape>
inline constexpr ForwardKernel kForwardKernel = {kDtype, Shape::kConfig, launch_forward<Shape>,
                                                 merge_parts<typename Shape::Element>};

}  // namespace fovea::cuda::hopper
