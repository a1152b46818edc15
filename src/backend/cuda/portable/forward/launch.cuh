// Launching of one forward kernel.
#pragma once

#include "backend/cuda/portable/forward/kernel.cuh"
#include "backend/cuda/portable/forward/kernels.h"
#include "backend/cuda/portable/forward/merge.cuh"

namespace fovea::cuda {

template <typename Shape>
cudaError_t launch_forward(const ForwardArguments& a, int64_t blocks, cudaStream_t stream) {
  const auto kernel = forward_kernel<Shape>;
  constexpr int kBytes = Shape::kConfig.shared_bytes();
  if (const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      error != cudaSuccess) {
    return error;
  }
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(a.parts));
  kernel<<<grid, Shape::kConfig.threads(), kBytes, stream>>>(a);
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch_merge(const ForwardArguments& a, cudaStream_t stream) {
  const int64_t rows =
      static_cast<int64_t>(a.batch) * a.p.head_kv * a.p.group * static_cast<int64_t>(a.p.q_len);
  const auto blocks = static_cast<unsigned>((rows * 32 + kMergeThreads - 1) / kMergeThreads);
  merge_parts_kernel<T><<<blocks, kMergeThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

template <DType kDtype, typename Shape>
inline constexpr ForwardKernel kForwardKernel = {kDtype, Shape::kConfig, launch_forward<Shape>,
                                                 launch_merge<typename Shape::Element>};

}  // namespace fovea::cuda
