// Launching of one backward pass.
#pragma once

#include "backend/cuda/common/launch.cuh"
#include "backend/cuda/portable/backward/bias.cuh"
#include "backend/cuda/portable/backward/instance.h"
#include "backend/cuda/portable/backward/keys.cuh"
#include "backend/cuda/portable/backward/rows.cuh"
#include "backend/cuda/portable/backward/short.cuh"
#include "backend/cuda/portable/backward/small_keys.cuh"
#include "backend/cuda/portable/backward/stats.h"
#include "base/ceil_div.h"

namespace fovea::cuda {

// A kernel as an argument.
template <auto kKernel>
struct Kernel {};

template <auto kKernel, typename... Rest>
cudaError_t launch_blocks(int64_t blocks, int threads, int shared_bytes, cudaStream_t stream,
                          const BackwardArguments& a, Rest... rest) {
  if (blocks == 0) return cudaSuccess;
  return launch<kKernel>({dim3(static_cast<unsigned>(blocks)), threads, shared_bytes, stream}, a,
                         rest...);
}

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

template <typename Shape>
cudaError_t launch_backward(const BackwardArguments& a, cudaStream_t stream) {
  using T = typename Shape::Element;
  constexpr BackwardConfig kC = Shape::kConfig;
  if constexpr (Shape::kOnePass.small_heads) {
    if (a.one_launch) return launch_short<Shape>(a, stream);
  }
  const Problem& p = a.p;
  const int64_t heads = static_cast<int64_t>(a.batch) * p.head_kv;
  cudaError_t error = row_stats<T>(a, stream);
  const auto then = [&]<auto kKernel>(Kernel<kKernel>, int64_t blocks, int threads, int bytes) {
    if (error == cudaSuccess) error = launch_blocks<kKernel>(blocks, threads, bytes, stream, a);
  };
  const auto keys = [&]<auto kKernel>(Kernel<kKernel> kernel, const BackwardConfig& c) {
    const int64_t blocks = a.even.tiles > 0
                               ? a.even.first_block[a.even.tiles]
                               : heads * ceil_div(p.kv_len, c.key_tile()) * a.row_parts;
    then(kernel, blocks, c.key_threads(), c.key_shared_bytes());
  };
  if (a.dq_sum != nullptr) {
    if constexpr (Shape::kOnePass.one_pass()) {
      if constexpr (Shape::kOnePass.small_heads) {
        if constexpr (Shape::kOnePass.long_tile_q > 0) {
          using Long = LongTiles<Shape>;
          if (a.long_tiles) keys(Kernel<backward_small_keys_kernel<Long>>{}, Long::kOnePass);
        }
        if (!a.long_tiles) keys(Kernel<backward_small_keys_kernel<Shape>>{}, Shape::kOnePass);
      } else {
        keys(Kernel<backward_keys_kernel<Shape, static_cast<int>(KeySums::kAll)>>{},
             Shape::kOnePass);
      }
      if (error == cudaSuccess) error = round_sums<T, kC.dim_qk, kC.dim_v>(a, stream);
    }
  } else if constexpr (Shape::kTwoKernels) {
    if constexpr (kC.split) {
      keys(Kernel<backward_keys_kernel<Shape, static_cast<int>(KeySums::kDk)>>{}, kC);
      keys(Kernel<backward_keys_kernel<Shape, static_cast<int>(KeySums::kDv)>>{}, kC);
    } else {
      keys(Kernel<backward_keys_kernel<Shape, static_cast<int>(KeySums::kBoth)>>{}, kC);
    }
    const int64_t row_tiles = ceil_div(int64_t{p.group} * p.q_len, kC.row_tile());
    then(Kernel<backward_rows_kernel<Shape>>{}, heads * row_tiles, kC.row_threads(),
         kC.row_shared_bytes());
  }
  if constexpr (kC.terms == Terms::kAny || kC.terms == Terms::kBias) {
    using Bias = BiasBlock<T, kC.dim_qk, kC.dim_v>;
    if (a.dbias != nullptr && !a.dbias_in_pass) {
      const int64_t row_tiles = a.dbias_rows == 1 ? 1 : ceil_div(p.q_len, Bias::kTileQ);
      const int64_t blocks = static_cast<int64_t>(a.dbias_batches) * a.dbias_heads * row_tiles *
                             ceil_div(p.kv_len, Bias::kTileKv);
      then(Kernel<backward_bias_kernel<T, kC.dim_qk, kC.dim_v>>{}, blocks, Bias::kThreads,
           Bias::kBytes);
    }
  }
  return error == cudaSuccess && a.dsink != nullptr ? sink_gradient(a, stream) : error;
}

template <DType kDtype, typename Shape>
inline constexpr BackwardKernel kBackwardKernel = {kDtype, Shape::kConfig, Shape::kOnePass,
                                                   launch_backward<Shape>};

}  // namespace fovea::cuda
