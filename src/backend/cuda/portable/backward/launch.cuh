// Launching of one backward pass.
#pragma once

#include "backend/cuda/portable/backward/apart.h"
#include "backend/cuda/portable/backward/instance.h"
#include "backend/cuda/portable/backward/keys.cuh"
#include "backend/cuda/portable/backward/launch_blocks.cuh"
#include "backend/cuda/portable/backward/short.cuh"
#include "backend/cuda/portable/backward/small_keys.cuh"
#include "backend/cuda/portable/backward/stats.h"
#include "base/ceil_div.h"

namespace fovea::cuda {

// A kernel as an argument.
template <auto kKernel>
struct Kernel {};

// The one launch of short sequences; the gradient of a sink, which is a sum over all rows, has
// another.
template <typename Shape>
cudaError_t launch_short(const BackwardArguments& a, cudaStream_t stream) {
  constexpr ShortConfig kC = Shape::kShort;
  const Problem& p = a.p;
  const int64_t heads = static_cast<int64_t>(a.batch) * p.head_kv;
  const int64_t keys = heads * ceil_div(p.kv_len, kC.key_tile());
  const int64_t rows =
      heads * ceil_div(p.group * ceil_div(p.q_len, kC.row_tile()), kC.warps / kC.row_sharing);
  const bool longest_first = keys + rows > int64_t{kC.blocks} * a.sm_count;
  cudaError_t error = launch_blocks<backward_short_kernel<Shape>>(
      keys + rows, kC.threads(), short_shared_bytes<Shape>(), stream, a, static_cast<int>(keys),
      longest_first);
  if (error == cudaSuccess && a.dsink != nullptr) {
    error = sink_gradient(a, stream);
  }
  return error;
}

// One pass over blocks of keys, and the rounding of what they summed.
template <typename Shape>
cudaError_t launch_one_pass(const BackwardArguments& a, cudaStream_t stream) {
  const Problem& p = a.p;
  const auto keys = [&]<auto kKernel>(Kernel<kKernel>, const BackwardConfig& c) {
    const int64_t tiles = ceil_div(p.kv_len, c.key_tile());
    const int64_t blocks = a.even.tiles > 0 ? a.even.first_block[a.even.tiles]
                                            : int64_t{a.batch} * p.head_kv * tiles * a.row_parts;
    return launch_blocks<kKernel>(blocks, c.key_threads(), c.key_shared_bytes(), stream, a);
  };
  constexpr BackwardConfig kC = Shape::kOnePass;
  cudaError_t error = cudaSuccess;
  if constexpr (!kC.small_heads) {
    error = keys(Kernel<backward_keys_kernel<Shape, static_cast<int>(KeySums::kAll)>>{}, kC);
  } else if (!a.long_tiles) {
    error = keys(Kernel<backward_small_keys_kernel<Shape>>{}, kC);
  } else if constexpr (kC.long_tile_q > 0) {
    using Long = LongTiles<Shape>;
    error = keys(Kernel<backward_small_keys_kernel<Long>>{}, Long::kOnePass);
  }
  if (error != cudaSuccess) return error;
  return round_sums<typename Shape::Element, kC.dim_qk, kC.dim_v>(a, stream);
}

template <typename Shape>
cudaError_t launch_backward(const BackwardArguments& a, cudaStream_t stream) {
  using T = typename Shape::Element;
  constexpr BackwardConfig kC = Shape::kConfig;
  if constexpr (Shape::kOnePass.small_heads) {
    if (a.one_launch) return launch_short<Shape>(a, stream);
  }
  cudaError_t error = row_stats<T>(a, stream);
  if (error != cudaSuccess) return error;
  if (a.dq_sum != nullptr) {
    if constexpr (Shape::kOnePass.one_pass()) error = launch_one_pass<Shape>(a, stream);
  } else if constexpr (Shape::kTwoKernels) {
    error = launch_two_kernels<Shape>(a, stream);
  }
  if constexpr (kC.terms == Terms::kAny || kC.terms == Terms::kBias) {
    if (error == cudaSuccess && a.dbias != nullptr && !a.dbias_in_pass) {
      error = bias_gradient<T, kC.dim_qk, kC.dim_v>(a, stream);
    }
  }
  return error == cudaSuccess && a.dsink != nullptr ? sink_gradient(a, stream) : error;
}

template <DType kDtype, typename Shape>
inline constexpr BackwardKernel kBackwardKernel = {kDtype, Shape::kConfig, Shape::kOnePass,
                                                   launch_backward<Shape>};

}  // namespace fovea::cuda
