// Launching of one forward kernel.
#pragma once

#include "backend/cuda/common/launch.cuh"
#include "backend/cuda/common/merge_parts.h"
#include "backend/cuda/portable/forward/instance.h"
#include "backend/cuda/portable/forward/kernel.cuh"

namespace fovea::cuda {

template <typename Shape>
cudaError_t launch_forward(const ForwardArguments& a, int64_t blocks, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(a.parts.count));
  return launch<forward_kernel<Shape>>({grid, Shape::kConfig.threads(), a.shared_bytes, stream}, a);
}

template <DType kDtype, typename Shape>
inline constexpr ForwardKernel kForwardKernel = {kDtype, Shape::kConfig, launch_forward<Shape>,
                                                 merge_parts<typename Shape::Element>};

}  // namespace fovea::cuda
