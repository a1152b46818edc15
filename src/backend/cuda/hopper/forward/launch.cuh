// Launching of one forward kernel.
#pragma once

#include "backend/cuda/common/launch.cuh"
#include "backend/cuda/common/merge_parts.h"
#include "backend/cuda/hopper/forward/instance.h"
#include "backend/cuda/hopper/forward/kernel.cuh"
#include "backend/cuda/hopper/forward/resident.cuh"

namespace fovea::cuda::hopper {

// Before a kernel whose blocks claim tiles. A memset would do, but that neither begins nor lets
// begin before the kernel ahead has ended.
static __global__ void clear_ticket(int* ticket) {
  ptx::let_next_kernel_begin();
  ptx::wait_for_earlier_kernels();
  *ticket = 0;
}

template <typename Shape>
cudaError_t launch_resident(const ForwardArguments& a, cudaStream_t stream) {
  constexpr int kBytes = sizeof(ResidentShared<Shape>);
  static_assert(kBytes <= kMostSharedBytes);
  const auto count = [](int n) { return static_cast<unsigned>(n); };
  const dim3 tiles(count(a.schedule.row_tiles), count(a.p.head_q),
                   count(a.schedule.heads / a.p.head_q));
  return launch<resident_kernel<Shape>>({tiles, Shape::kConfig.threads(), kBytes, stream}, a);
}

template <typename Shape>
cudaError_t launch_forward(const ForwardArguments& a, int blocks, cudaStream_t stream) {
  if constexpr (Shape::kConfig.resident) {
    return launch_resident<Shape>(a, stream);
  } else {
    constexpr int kBytes = sizeof(Shared<Shape>);
    static_assert(kBytes <= kMostSharedBytes);
    if (a.schedule.ticket != nullptr) {
      const cudaError_t error = launch<clear_ticket>({dim3(1), 1, 0, stream}, a.schedule.ticket);
      if (error != cudaSuccess) return error;
    }
    return launch<forward_kernel<Shape>>(
        {dim3(static_cast<unsigned>(blocks)), Shape::kConfig.threads(), kBytes, stream}, a);
  }
}

template <DType kDtype, typename Shape>
inline constexpr ForwardKernel kForwardKernel = {kDtype, Shape::kConfig, launch_forward<Shape>,
                                                 merge_parts<typename Shape::Element>};

}  // namespace fovea::cuda::hopper
