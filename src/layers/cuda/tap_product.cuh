// The kernel of a product over taps: a block makes a tile of rows and channels, its contraction
// running over taps and channels through a ring of stages in shared memory.
#pragma once

#include "layers/cuda/grouped_dots.cuh"
#include "layers/cuda/tap_product.h"
#include "prim/cuda/ptx/grid_dependency.cuh"
#include "prim/cuda/tile/products.cuh"

namespace fovea::layers::cuda {

template <typename T_, int kRows_>
struct TapShape {
  using T = T_;
  static constexpr int kRows = kRows_, kCols = 128, kThreads = 256, kStages = 3;
  static constexpr int kDepth = 128 / int{sizeof(T)};  // channels of a stage
  static constexpr int kPerChunk = 16 / int{sizeof(T)};
  // Warps stand two by four.
  static constexpr int kWarpRows = kRows / 2, kWarpCols = kCols / 4;
  static constexpr int kM = kWarpRows / 16, kN = kWarpCols / 8;
  using Left = tile::SharedTile<T, kRows, kDepth>;
  using Right = tile::SharedTile<T, kCols, kDepth>;
  static constexpr int kStageBytes = Left::kBytes + Right::kBytes;
  static constexpr int kPitch = kCols + 8;  // of sums: fragments are stored without conflicts
  static constexpr int kSumBytes = kRows * kPitch * 4;
  static constexpr int kSharedBytes =
      kStages * kStageBytes > kSumBytes ? kStages* kStageBytes : kSumBytes;
};

// Which tile a block makes.
struct TileAt {
  int block, row, col, cols;  // of `to`, and of the block's channels
  int begin, end;             // of the channels that are summed over

  __device__ TileAt(const TapProduct& a, int rows_of_tile) {
    const int first = a.row_tiles * a.col_tiles[0], id = static_cast<int>(blockIdx.x);
    block = id >= first;
    const int n = id - block * first, across = a.col_tiles[block];
    const TapBlock& b = a.block[block];
    row = n / across * rows_of_tile;
    col = n % across * a.tile_cols;
    cols = min(a.tile_cols, b.channels - col);
    begin = col / b.group * b.group;
    end = ((col + cols - 1) / b.group + 1) * b.group;
  }
};

// Brings the operands of one step after another. Threads stand eight to a row of 128 bytes.
template <typename Shape>
class TapLoader {
  using T = typename Shape::T;
  static constexpr int kRowStep = Shape::kThreads / 8;
  static constexpr int kLeft = Shape::kRows / kRowStep, kRight = Shape::kCols / kRowStep;

 public:
  __device__ TapLoader(const TapProduct& a, const TileAt& tile)
      : a_(a), block_(a.block[tile.block]), tile_(tile), k_(tile.begin) {
    const int row = threadIdx.x / 8;
#pragma unroll
    for (int i = 0; i < kLeft; ++i) {
      const int number = tile.row + row + i * kRowStep;
      const RowAt at(min(number, a.all_rows - 1), a.rows);
      row_[i] = number < a.all_rows ? at.r + a.first_row : kNowhere;
      from_[i] = a.from.template at<T>(at.b, at.r + a.first_row) + block_.first;
    }
#pragma unroll
    for (int i = 0; i < kRight; ++i) {
      const int n = row + i * kRowStep;
      const int col = tile.col + n;
      low_[i] = n < tile.cols ? col / block_.group * block_.group : kNowhere;
    }
  }

  // The next step's operands.
  __device__ __forceinline__ void fill(uint32_t s_left, uint32_t s_right) {
    const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
    const int k = k_ + chunk * Shape::kPerChunk;
#pragma unroll
    for (int i = 0; i < kLeft; ++i) {
      const bool take = static_cast<unsigned>(row_[i] + tap_) < static_cast<unsigned>(a_.from_rows);
      const bool in = take && k < tile_.end;
      const T* const from = from_[i] + tap_ * a_.from.row + k;
      ptx::cp_async_16(s_left + Shape::Left::offset(row + i * kRowStep, chunk),
                       in ? from : a_.from.data, in ? 16 : 0);
    }
    const T* const weight = static_cast<const T*>(block_.weight);
#pragma unroll
    for (int i = 0; i < kRight; ++i) {
      const int local = k - low_[i];
      const bool in = static_cast<unsigned>(local) < static_cast<unsigned>(block_.group);
      const int64_t n = int64_t{tap_} * block_.channels + tile_.col + row + i * kRowStep;
      ptx::cp_async_16(s_right + Shape::Right::offset(row + i * kRowStep, chunk),
                       in ? weight + n * block_.group + local : weight, in ? 16 : 0);
    }
    k_ += Shape::kDepth;
    if (k_ >= tile_.end) k_ = tile_.begin, ++tap_;
  }

 private:
  static constexpr int kNowhere = -(1 << 30);
  const TapProduct& a_;
  const TapBlock& block_;
  const TileAt& tile_;
  int k_, tap_ = 0;
  const T* from_[kLeft];
  int row_[kLeft];   // of `from`, without the tap
  int low_[kRight];  // the first channel of the group that a column is of
};

// Sums to shared memory, where rows and heads are whole.
template <typename Shape>
__device__ __forceinline__ void store_sums(float* s_sums, int row, int col,
                                           const ptx::Fragment (&sum)[Shape::kM][Shape::kN]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < Shape::kM; ++m) {
#pragma unroll
    for (int n = 0; n < Shape::kN; ++n) {
#pragma unroll
      for (int y = 0; y < 2; ++y) {
        float* const to =
            s_sums + (row + m * 16 + y * 8 + lane / 4) * Shape::kPitch + col + n * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(to) = {sum[m][n][2 * y], sum[m][n][2 * y + 1]};
      }
    }
  }
}

// kStore and kCouple: pair by pair.
template <typename Shape>
__device__ void end_pairs(const TapProduct& a, const TileAt& tile, const float* s_sums) {
  using T = typename Shape::T;
  const TapBlock& block = a.block[tile.block];
  const T* const bias = static_cast<const T*>(block.bias);
  const int rows = min(Shape::kRows, a.all_rows - tile.row);
  constexpr int kPairs = Shape::kCols / 2, kRowStep = Shape::kThreads / kPairs;
  const int i = threadIdx.x % kPairs * 2;
  if (i >= tile.cols) return;
  const int channel = block.first + tile.col + i;
#pragma unroll 4
  for (int r = threadIdx.x / kPairs; r < rows; r += kRowStep) {
    const RowAt at(tile.row + r, a.rows);
    float2 x = *reinterpret_cast<const float2*>(s_sums + r * Shape::kPitch + i);
    if (bias != nullptr) {
      x = x + float2{ptx::to_float(bias[tile.col + i]), ptx::to_float(bias[tile.col + i + 1])};
    }
    if (a.ending == Ending::kCouple) x = x + a.finish.coupling.pair<T>(tile.row + r, at, channel);
    store_pair(a.to.template at<T>(at.b, at.r) + channel, x);
  }
}

// kGrouped: groups are narrower than a tile, and channels of different groups do not meet.
template <typename Shape, bool kGrouped>
__global__ void __launch_bounds__(Shape::kThreads, 2)
    tap_product_kernel(const __grid_constant__ TapProduct a) {
  using T = typename Shape::T;
  extern __shared__ __align__(128) std::byte shared[];
  const uint32_t s_stages = ptx::shared_address(shared);
  const TileAt tile(a, Shape::kRows);
  const int warp = threadIdx.x / 32;
  const int row = warp / 4 * Shape::kWarpRows, col = warp % 4 * Shape::kWarpCols;
  const int steps_of_tap = (tile.end - tile.begin + Shape::kDepth - 1) / Shape::kDepth;
  const int steps = steps_of_tap * a.taps;
  ptx::wait_for_earlier_kernels();

  TapLoader<Shape> loader(a, tile);
  const auto left_of = [&](int stage) { return s_stages + stage * Shape::kStageBytes; };
  const auto right_of = [&](int stage) { return left_of(stage) + Shape::Left::kBytes; };
#pragma unroll
  for (int s = 0; s < Shape::kStages - 1; ++s) {
    if (s < steps) loader.fill(left_of(s), right_of(s));
    ptx::cp_async_commit();
  }
  ptx::Fragment sum[Shape::kM][Shape::kN];
  tile::clear(sum);
  const GroupsOfColumns<Shape::kN> groups(tile.col + col, a.block[tile.block].group);
  int stage = 0, next = Shape::kStages - 1, k = tile.begin;
  for (int step = 0; step < steps; ++step) {
    ptx::cp_async_wait<Shape::kStages - 2>();
    __syncthreads();
    if (step + Shape::kStages - 1 < steps) loader.fill(left_of(next), right_of(next));
    ptx::cp_async_commit();
    if constexpr (kGrouped) {
      add_dots_in_groups<T, typename Shape::Left, typename Shape::Right>(
          sum, left_of(stage), row, right_of(stage), col, k, groups);
    } else {
      tile::add_dot_rows<T, typename Shape::Left, typename Shape::Right>(sum, left_of(stage), row,
                                                                         right_of(stage), col);
    }
    k += Shape::kDepth;
    if (k >= tile.end) k = tile.begin;
    stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
    next = next + 1 == Shape::kStages ? 0 : next + 1;
  }
  ptx::cp_async_wait<0>();
  __syncthreads();

  float* const s_sums = reinterpret_cast<float*>(shared);
  store_sums<Shape>(s_sums, row, col, sum);
  __syncthreads();
  if (a.ending == Ending::kFinish) {
    const TapBlock& block = a.block[tile.block];
    const T* const bias = static_cast<const T*>(block.bias);
    a.finish.heads<T>(s_sums, Shape::kPitch, tile.row, Shape::kRows, block.first + tile.col,
                      tile.cols, bias != nullptr ? bias + tile.col : nullptr);
  } else {
    end_pairs<Shape>(a, tile, s_sums);
  }
}

}  // namespace fovea::layers::cuda
