// Launching of one backward pass: what it needs of every row, the kernel, the rounding of its sums.
#pragma once

#include "backend/cuda/common/exponents.h"
#include "backend/cuda/common/launch.cuh"
#include "backend/cuda/hopper/backward/instance.h"
#include "backend/cuda/hopper/backward/kernel.cuh"
#include "backend/cuda/portable/backward/stats.h"
#include "base/ceil_div.h"

namespace fovea::cuda::hopper {

template <typename Shape>
cudaError_t launch_backward(const BackwardArguments& arguments, cudaStream_t stream) {
  using T = typename Shape::Element;
  constexpr BackwardConfig kC = Shape::kConfig;
  constexpr int kBytes = sizeof(BackwardShared<Shape>);
  static_assert(kBytes <= kMostSharedBytes);
  const cuda::BackwardArguments& a = arguments.a;
  cudaError_t error = row_stats<T>(a, stream);
  if (error != cudaSuccess) return error;
  const int64_t blocks =
      int64_t{a.batch} * a.p.head_kv * ceil_div(a.p.kv_len, kC.keys()) * a.row_parts;
  const Launch how = {dim3(static_cast<unsigned>(blocks)), kC.threads(), kBytes, stream};
  error = products_are_exponents(a.p.scale) ? launch<backward_kernel<Shape, true>>(how, arguments)
                                            : launch<backward_kernel<Shape, false>>(how, arguments);
  if (error != cudaSuccess) return error;
  error = round_sums<T, kC.dim, kC.dim>(a, stream);
  return error == cudaSuccess && a.dsink != nullptr ? sink_gradient(a, stream) : error;
}

template <DType kDtype, typename Shape>
inline constexpr BackwardKernel kBackwardKernel = {kDtype, Shape::kConfig, launch_backward<Shape>};

}  // namespace fovea::cuda::hopper
