// Launches of the prologue's kernels.
#pragma once

#include "backend/cuda/common/launch.cuh"
#include "base/ceil_div.h"
#include "layers/cuda/dense_product.h"
#include "layers/cuda/head_rows_conv.cuh"
#include "layers/cuda/prologue_plan.h"
#include "layers/cuda/side_stream.h"
#include "layers/cuda/tap_product.cuh"

namespace fovea::layers::cuda {

using fovea::cuda::Launch;

inline dim3 blocks_of(int64_t x, int64_t y = 1) {
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
}

// Launches one after another; the first that fails is the last.
class Launches {
 public:
  explicit Launches(cudaStream_t stream) : stream_(stream) {}

  template <auto kKernel, typename Arguments>
  void add(dim3 blocks, int threads, int shared_bytes, const Arguments& a) {
    if (error_ != cudaSuccess || blocks.x == 0) return;
    error_ = fovea::cuda::launch<kKernel>(Launch{blocks, threads, shared_bytes, stream_}, a);
  }
  // What launches by itself: call(stream) gives an error.
  template <typename Call>
  void add_call(const Call& call) {
    if (error_ == cudaSuccess) error_ = call(stream_);
  }
  cudaError_t error() const { return error_; }

 private:
  cudaStream_t stream_;
  cudaError_t error_ = cudaSuccess;
};

// The product with its tiles laid out; gives how many they are.
template <typename Shape>
int64_t lay_tiles(TapProduct& a) {
  int64_t tiles = 0;
  a.row_tiles = static_cast<int>(ceil_div(a.all_rows, Shape::kRows));
  for (int n = 0; n < a.blocks; ++n) {
    a.col_tiles[n] = static_cast<int>(ceil_div(a.block[n].channels, a.tile_cols));
    tiles += int64_t{a.row_tiles} * a.col_tiles[n];
  }
  return tiles;
}

template <typename Shape, bool kGrouped>
void add_tiles(Launches& to, TapProduct a) {
  const int64_t tiles = lay_tiles<Shape>(a);
  to.add<tap_product_kernel<Shape, kGrouped>>(blocks_of(tiles), Shape::kThreads,
                                              Shape::kSharedBytes, a);
}

// Whether there are so many rows that blocks take several tiles of them; then it is launched.
template <typename Shape, bool kBackward>
bool add_head_rows(Launches& to, HeadConv a) {
  constexpr int kBlocks = 264, kManyTiles = 4 * kBlocks;
  const TapProduct& p = a.product;
  if (p.taps != Shape::kTaps || p.block[0].group != Shape::kGroup) return false;
  const int64_t tiles = lay_tiles<Shape>(a.product);
  if (tiles < kManyTiles) return false;
  const int across = p.col_tiles[0] + p.col_tiles[1];
  to.add<head_rows_kernel<Shape, kBackward>>(blocks_of(std::max(1, kBlocks / across) * across),
                                             Shape::kThreads, Shape::kSharedBytes, a);
  return true;
}

template <typename T, bool kBackward>
void add_heads(Launches& to, HeadConv a) {
  if constexpr (sizeof(T) == 2) {
    if (add_head_rows<HeadRowsShape<T, 16>, kBackward>(to, a) ||
        add_head_rows<HeadRowsShape<T, 32>, kBackward>(to, a)) {
      return;
    }
    using Shape = HeadConvShape<T>;
    const int64_t tiles = lay_tiles<Shape>(a.product);
    to.add<head_conv_kernel<Shape, kBackward>>(blocks_of(tiles), Shape::kThreads,
                                               Shape::kSharedBytes, a);
  }
}

// Tiles of many rows where they fill a GPU, and otherwise of few. Products of groups, which are
// short, have no registers for as many.
template <typename T, bool kGrouped>
void add_product(Launches& to, const TapProduct& a) {
  if constexpr (sizeof(T) == 4) {
    add_tiles<TapShape<T, 64>, kGrouped>(to, a);
  } else {
    constexpr int kMany = kGrouped ? 64 : 128, kFew = 32, kEnough = 128;
    const int64_t across = ceil_div(a.block[0].channels, a.tile_cols);
    ceil_div(a.all_rows, kMany) * across >= kEnough ? add_tiles<TapShape<T, kMany>, kGrouped>(to, a)
                                                    : add_tiles<TapShape<T, kFew>, kGrouped>(to, a);
  }
}

template <typename T>
void add_product(Launches& to, const TapProduct& a) {
  if constexpr (sizeof(T) == 2) {
    if (takes_dense<T>(a)) {
      to.add_call([&](cudaStream_t stream) { return launch_dense<T>(a, stream); });
      return;
    }
  }
  bool grouped = false;
  for (int n = 0; n < a.blocks; ++n) {
    grouped = grouped || a.block[n].group < a.block[n].channels;
  }
  if (a.blocks > 0) grouped ? add_product<T, true>(to, a) : add_product<T, false>(to, a);
}

template <typename T>
void add_gradients(Launches& to, const WeightGradients& a) {
  using Shape = GradientShape<T>;
  to.add<weight_gradients_kernel<Shape>>(blocks_of(a.blocks), Shape::kThreads, Shape::kSharedBytes,
                                         a);
}

template <typename T>
void add_sums(Launches& to, const PartSums& a) {
  to.add<part_sums_kernel<T>>(blocks_of(a.blocks), kSumThreads, 0, a);
}

template <typename T>
bool has_clusters() {
  bool begin_early = false;  // which is of the same GPUs
  if constexpr (sizeof(T) == 2) {
    const cudaError_t error =
        fovea::cuda::prepared_kernel<tile_gradients_kernel<T>>.on_current_device(
            reinterpret_cast<const void*>(tile_gradients_kernel<T>), kSliceSharedBytes,
            begin_early);
    if (error != cudaSuccess) return false;
  }
  return begin_early;
}

template <typename T>
void add_tiles(Launches& to, const TileForward& a) {
  const dim3 blocks = blocks_of(a.blocks);
  a.few ? to.add<tile_forward_kernel<T, true>>(blocks, kTileThreads, kTileSharedBytes<true>, a)
        : to.add<tile_forward_kernel<T, false>>(blocks, kTileThreads, kTileSharedBytes<false>, a);
}
template <typename T>
void add_tiles(Launches& to, const TileBackward& a) {
  const dim3 blocks = blocks_of(a.blocks);
  a.few ? to.add<tile_backward_kernel<T, true>>(blocks, kTileThreads, kTileSharedBytes<true>, a)
        : to.add<tile_backward_kernel<T, false>>(blocks, kTileThreads, kTileSharedBytes<false>, a);
}

template <typename T>
cudaError_t run(const ForwardPlan& plan, cudaStream_t stream) {
  Launches to(stream);
  if constexpr (sizeof(T) == 2) {
    add_tiles<T>(to, plan.tiles);
    to.add<whole_forward_kernel<T>>(blocks_of(plan.whole.blocks), kWholeThreads, kWholeSharedBytes,
                                    plan.whole);
  }
  const Before& b = plan.before;
  to.add<before_kernel<T>>(blocks_of(b.token_blocks + b.depthwise_blocks + b.packs.tiles),
                           kTokenThreads, 0, b);
  add_product<T>(to, plan.first);
  add_heads<T, false>(to, plan.heads);
  add_product<T>(to, plan.second);
  const FinishAlone& f = plan.finish;
  if (f.cols > 0) {
    to.add<finish_kernel<T>>(
        blocks_of(ceil_div(f.tokens, kTokensOfBlock), ceil_div(f.channels, f.cols)), kTokenThreads,
        0, f);
  }
  return to.error();
}

template <typename T>
cudaError_t run(const BackwardPlan& plan, cudaStream_t stream) {
  Launches to(stream), beside(plan.side != nullptr ? plan.side->get() : stream);
  const auto first_error = [&] { return to.error() == cudaSuccess ? beside.error() : to.error(); };
  const auto follow = [&] {
    if (plan.side != nullptr) to.add_call([&](auto queue) { return plan.side->follow(queue); });
  };
  if constexpr (sizeof(T) == 2) {
    if (plan.tiles.blocks > 0) {
      add_tiles<T>(to, plan.tiles);
      follow();  // z's gradient is there
      add_heads<T, false>(to, plan.heads_again);
      to.add<tile_gradients_kernel<T>>(blocks_of(plan.tile_gradients.blocks), kSliceThreads,
                                       kSliceSharedBytes, plan.tile_gradients);
      add_gradients<T>(to, plan.weights);
      add_sums<T>(to, plan.sums);
      return to.error();
    }
  }
  to.add<after_kernel<T>>(blocks_of(plan.after.token_blocks + plan.after.packs.tiles),
                          kTokenThreads, 0, plan.after);
  // From here on memory is written that what is beside has read until now.
  if (plan.side != nullptr) to.add_call([&](auto queue) { return plan.side->lead(queue); });
  follow();
  add_product<T>(beside, plan.again);
  add_heads<T, false>(beside, plan.heads_again);
  for (int n = 0; n < plan.dense_count; ++n) {
    beside.add_call([&](auto queue) { return plan.others->add(plan.dense[n], queue); });
  }
  add_product<T>(to, plan.second);
  follow();
  beside.add<values_back_kernel<T>>(blocks_of(ceil_div(plan.values.tokens, kTokensOfBlock)),
                                    kTokenThreads, 0, plan.values);
  add_product<T>(to, plan.first);
  add_heads<T, true>(to, plan.heads);
  if (plan.spread.channels > 0) {
    to.add<spread_kernel<T>>(blocks_of(ceil_div(plan.spread.tokens, kTokensOfBlock)), kTokenThreads,
                             0, plan.spread);
  }
  if (to.error() != cudaSuccess) return first_error();
  add_gradients<T>(beside, plan.weights);
  int tiles = 0;
  for (int n = 0; n < plan.columns.count; ++n) tiles += plan.columns.sum[n].tiles;
  beside.add<column_sums_kernel<T>>(blocks_of(tiles, plan.columns.parts), kSumThreads, 0,
                                    plan.columns);
  add_sums<T>(beside, plan.sums);
  follow();
  return first_error();
}

}  // namespace fovea::layers::cuda
