// Launching of one backward pass: what it needs of every row, the kernel, the rounding of its sums.
#pragma once

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
  const Problem& p = a.p;
  const auto blocks = [](int64_t count) { return dim3(static_cast<unsigned>(count)); };
  const int64_t heads = int64_t{a.batch} * p.head_kv;
  cudaError_t error = row_stats<T>(a, stream);
  if (error != cudaSuccess) return error;
  const int64_t keys = heads * ceil_div(p.kv_len, kC.keys()) * a.row_parts;
  error = launch<backward_kernel<Shape>>({blocks(keys), kC.threads(), kBytes, stream}, arguments);
  if (error != cudaSuccess) return error;
  constexpr int kTile = cuda::BackwardConfig::kSumTile;
  const int64_t sums = ceil_div(int64_t{p.group} * p.q_len, kTile) +
                       (a.row_parts > 1 ? ceil_div(p.kv_len, kTile) : 0);
  error = launch<round_sums_kernel<T, kC.dim, kC.dim>>(
      {blocks(heads * sums), cuda::BackwardConfig::kSumThreads, 0, stream}, a);
  return error == cudaSuccess && a.dsink != nullptr ? sink_gradient(a, stream) : error;
}

template <DType kDtype, typename Shape>
inline constexpr BackwardKernel kBackwardKernel = {kDtype, Shape::kConfig, launch_backward<Shape>};

}  // namespace fovea::cuda::hopper
