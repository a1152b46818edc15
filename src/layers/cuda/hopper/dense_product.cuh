// The kernel of a dense product over taps: a warp asks TMA for rows and weights, two warpgroups
// multiply them. Rows of a chunk of channels come once for all taps: a tap's rows are the same tile
// from a row further on.
#pragma once

#include "layers/cuda/tap_product.cuh"
#include "prim/cuda/ptx/barrier.cuh"
#include "prim/cuda/ptx/registers.cuh"
#include "prim/cuda/ptx/tma.cuh"
#include "prim/cuda/ptx/wgmma.cuh"
#include "prim/cuda/tile/ring.cuh"
#include "prim/cuda/tile/swizzled.h"

namespace fovea::layers::cuda {

struct DenseProduct {
  TapProduct product;
  int row_tiles = 0;       // of a member of the batch
  CUtensorMap from;        // {channel, row, 1, member}
  CUtensorMap weights[2];  // {in, out, 1, tap}
};

template <typename T_>
struct DenseShape {
  using T = T_;
  static constexpr int kGroups = 2, kGroupRows = 64;  // warpgroups that multiply, and rows of each
  static constexpr int kRows = kGroups * kGroupRows, kCols = 128;
  static constexpr int kThreads = kGroups * 128;  // that multiply; a warp more loads
  static constexpr int kMostTaps = 9;             // that the rows of a chunk serve
  static constexpr int kPitch = kCols + 8;        // of sums: fragments are stored without conflicts
  using Left = tile::SwizzledTile<kGroupRows + kMostTaps - 1, tile::kPanelColumns>;
  using Right = tile::SwizzledTile<kCols, tile::kPanelColumns>;
  static constexpr int kLeftStages = 2, kRightStages = 4;

  struct Shared {
    alignas(tile::kTileAlignment) unsigned char left[kLeftStages][kGroups][Left::kBytes];
    unsigned char right[kRightStages][Right::kBytes];
    tile::RingBarriers<kLeftStages> left_ring;
    tile::RingBarriers<kRightStages> right_ring;
  };
  static_assert(kRows * kPitch * 4 <= kLeftStages * kGroups * Left::kBytes +
                                          kRightStages * Right::kBytes);  // sums lie there too
};

// Which tile a block makes: those of the first block of channels, which are the longer ones, come
// first, and those of the same rows one after another.
template <typename Shape>
struct DenseTile {
  int block, member, row, col, cols;

  __device__ explicit DenseTile(const DenseProduct& d) {
    const TapProduct& a = d.product;
    const int first = a.row_tiles * a.col_tiles[0], id = static_cast<int>(blockIdx.x);
    block = id >= first;
    const int n = id - block * first, across = a.col_tiles[block], down = n / across;
    member = down / d.row_tiles;
    row = (down - member * d.row_tiles) * Shape::kRows;
    col = (n - down * across) * a.tile_cols;
    cols = min(a.tile_cols, a.block[block].channels - col);
  }
};

template <typename Shape>
__device__ __forceinline__ void load_dense(const DenseProduct& d, const DenseTile<Shape>& tile,
                                           typename Shape::Shared& s) {
  const TapProduct& a = d.product;
  const TapBlock& block = a.block[tile.block];
  const CUtensorMap& weights = d.weights[tile.block];
  ptx::tma_prefetch_map(d.from);
  ptx::tma_prefetch_map(weights);
  tile::Ring<Shape::kLeftStages> left(s.left_ring);
  tile::Ring<Shape::kRightStages> right(s.right_ring);
  ptx::wait_for_earlier_kernels();
#pragma unroll 1
  for (int channel = 0; channel < block.channels; channel += tile::kPanelColumns) {
    left.acquire(Shape::kGroups * Shape::Left::kBytes);
#pragma unroll
    for (int g = 0; g < Shape::kGroups; ++g) {
      const ptx::BoxAt at = {block.first + channel, tile.row + g * Shape::kGroupRows + a.first_row,
                             0, tile.member};
      ptx::tma_load(ptx::shared_address(s.left[left.stage()][g]), d.from, at, left.full());
    }
    left.advance();
#pragma unroll 1
    for (int tap = 0; tap < a.taps; ++tap) {
      right.acquire(Shape::Right::kBytes);
      ptx::tma_load(ptx::shared_address(s.right[right.stage()]), weights,
                    {channel, tile.col, 0, tap}, right.full());
      right.advance();
    }
  }
}

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads + 32, 2)
    dense_product_kernel(const __grid_constant__ DenseProduct d) {
  using T = typename Shape::T;
  extern __shared__ __align__(tile::kTileAlignment) std::byte dense_shared[];
  auto& s = *reinterpret_cast<typename Shape::Shared*>(dense_shared);
  const TapProduct& a = d.product;
  const DenseTile<Shape> tile(d);
  constexpr int kWarps = Shape::kThreads / 32;
  if (threadIdx.x == 0) {
    s.left_ring.init(kWarps);
    s.right_ring.init(kWarps);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= Shape::kThreads) {
    if (threadIdx.x == Shape::kThreads) load_dense<Shape>(d, tile, s);
    return;
  }

  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  const TapBlock& block = a.block[tile.block];
  const uint64_t d_left = tile::matrix_descriptor(ptx::shared_address(s.left[0][group]), 16);
  const uint64_t d_right = tile::matrix_descriptor(ptx::shared_address(s.right[0]), 16);
  // One side of each ring waits for what comes, the other gives back what was multiplied: a tap's
  // products are still under way when those of the next are asked for.
  tile::Ring<Shape::kLeftStages> left(s.left_ring), used_left(s.left_ring);
  tile::Ring<Shape::kRightStages> right(s.right_ring), used_right(s.right_ring);
  const bool speaks = threadIdx.x % 32 == 0;
  float sum[Shape::kCols / 2] = {};
  const int steps = block.channels / tile::kPanelColumns * a.taps;
  int tap = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    if (tap == 0) left.wait();
    right.wait();
    ptx::wgmma_fence();
    const uint64_t rows =
        d_left + tile::descriptor_step(left.stage() * Shape::kGroups * Shape::Left::kBytes +
                                       tap * tile::kPanelRowBytes);
    const uint64_t columns = d_right + tile::descriptor_step(right.stage() * Shape::Right::kBytes);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      ptx::wgmma_ss<T, false>(sum, rows + tile::step_of_columns<typename Shape::Left>(k),
                              columns + tile::step_of_columns<typename Shape::Right>(k));
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    right.advance();
    if (step > 0) {
      if (speaks) used_right.release();
      used_right.advance();
      if (tap == 0) {
        if (speaks) used_left.release();
        used_left.advance();
      }
    }
    if (++tap == a.taps) {
      tap = 0;
      left.advance();
    }
  }
  ptx::wgmma_wait<0>();
  ptx::pin(sum);
  ptx::barrier_sync(1, Shape::kThreads);  // all have read what sums are stored over

  float* const s_sums = reinterpret_cast<float*>(dense_shared);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int n = 0; n < Shape::kCols / 8; ++n) {
    float* const to = s_sums + (warp * 16 + lane / 4) * Shape::kPitch + n * 8 + lane % 4 * 2;
    *reinterpret_cast<float2*>(to) = {sum[4 * n], sum[4 * n + 1]};
    *reinterpret_cast<float2*>(to + 8 * Shape::kPitch) = {sum[4 * n + 2], sum[4 * n + 3]};
  }
  ptx::barrier_sync(1, Shape::kThreads);
  const auto row_of = [&](int r) {
    const RowAt at(tile.member, tile.row + r);
    return TokenAt{at.b * a.rows + at.r, at, at.r < a.rows};
  };
  if (a.ending == Ending::kFinish) {
    const T* const bias = static_cast<const T*>(block.bias);
    a.finish.heads<T>(s_sums, Shape::kPitch, Shape::kRows, block.first + tile.col, tile.cols,
                      bias != nullptr ? bias + tile.col : nullptr, row_of, Shape::kThreads);
  } else {
    end_rows<Shape>(a, tile, s_sums, row_of);
  }
}

}  // namespace fovea::layers::cuda
