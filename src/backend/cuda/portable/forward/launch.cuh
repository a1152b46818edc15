// Launching of one forward kernel.
#pragma once

#include "backend/cuda/portable/forward/kernel.cuh"
#include "backend/cuda/portable/forward/kernels.h"
#include "backend/cuda/portable/forward/merge.cuh"

namespace fovea::cuda {

// Whether a kernel itself waits for the one before it: code for GPUs of old, translated for this
// one, does not.
template <typename Kernel>
bool waits_itself(Kernel kernel) {
  cudaFuncAttributes code{};
  return cudaFuncGetAttributes(&code, kernel) == cudaSuccess && code.ptxVersion >= 90;
}

template <typename Shape>
cudaError_t launch_forward(const ForwardArguments& a, int64_t blocks, cudaStream_t stream) {
  const auto kernel = forward_kernel<Shape>;
  if (const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, a.shared_bytes);
      error != cudaSuccess) {
    return error;
  }
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(a.parts));
  launch.blockDim = dim3(Shape::kConfig.threads());
  launch.dynamicSmemBytes = static_cast<size_t>(a.shared_bytes);
  launch.stream = stream;
  launch.attrs = &early;
  static const bool waits = waits_itself(kernel);
  launch.numAttrs = a.comes_early && waits ? 1 : 0;
  return cudaLaunchKernelEx(&launch, kernel, a);
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
