// The kernel of a product over taps: a block makes a tile of rows and channels. Its contraction
// runs over chunks of channels and, within a chunk, over taps: rows of a chunk come once for all
// taps, weights for each.
#pragma once

#include "layers/cuda/tap_dots.cuh"
#include "layers/cuda/tap_product.h"
#include "prim/cuda/ptx/grid_dependency.cuh"

namespace fovea::layers::cuda {

template <typename T_, int kRows_>
struct TapShape {
  using T = T_;
  static constexpr int kRows = kRows_, kCols = 128, kThreads = 256, kStages = 3;
  static constexpr int kTaps = 16;                     // that rows of a chunk serve
  static constexpr int kDepth = 128 / int{sizeof(T)};  // channels of a chunk
  static constexpr int kPerPiece = 16 / int{sizeof(T)};
  // Warps stand two by four.
  static constexpr int kWarpRows = kRows / 2, kWarpCols = kCols / 4;
  static constexpr int kM = kWarpRows / 16, kN = kWarpCols / 8;
  using Left = tile::SharedTile<T, kRows + kTaps, kDepth>;
  using Right = tile::SharedTile<T, kCols, kDepth>;
  static constexpr int kStageBytes = kStages * (Left::kBytes + Right::kBytes);
  static constexpr int kPitch = kCols + 8;  // of sums: fragments are stored without conflicts
  static constexpr int kSumBytes = kRows * kPitch * 4;
  static constexpr int kSharedBytes = kStageBytes > kSumBytes ? kStageBytes : kSumBytes;
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

// The order of a contraction's steps, and where in shared memory their operands lie.
template <typename Shape>
struct Step {
  int channel, tap = 0;
  int left = 0, right = 0;  // stages

  __device__ explicit Step(const TileAt& tile) : channel(tile.begin) {}
  // Rows serve kTaps taps.
  __device__ __forceinline__ bool brings_rows() const { return tap % Shape::kTaps == 0; }
  __device__ __forceinline__ void next(const TapProduct& a, const TileAt& tile) {
    right = right + 1 == Shape::kStages ? 0 : right + 1;
    ++tap;
    if (tap % Shape::kTaps != 0 && tap < a.taps) return;
    left = left + 1 == Shape::kStages ? 0 : left + 1;
    channel += Shape::kDepth;
    const int first = (tap - 1) / Shape::kTaps * Shape::kTaps;
    if (channel < tile.end) {
      tap = first;  // the same taps of the next channels
    } else {
      channel = tile.begin;  // the next taps
    }
  }
};

// Brings the operands of one step after another. Threads stand eight to a row of 128 bytes.
template <typename Shape>
class TapLoader {
  using T = typename Shape::T;
  static constexpr int kRowStep = Shape::kThreads / 8;
  static constexpr int kLeftRows = Shape::Left::kRows;
  static constexpr int kLeft = (kLeftRows + kRowStep - 1) / kRowStep;
  static constexpr int kRight = Shape::kCols / kRowStep;

 public:
  __device__ TapLoader(const TapProduct& a, const TileAt& tile)
      : a_(a), block_(a.block[tile.block]), tile_(tile) {
    const int row = threadIdx.x / 8, piece = threadIdx.x % 8 * Shape::kPerPiece;
    from_ = static_cast<const T*>(a.from.data) + block_.first + piece;
#pragma unroll
    for (int i = 0; i < kLeft; ++i) {
      const RowAt at(tile.row + row + i * kRowStep, a.span);
      row_[i] = at.r + a.first_row;
      offset_[i] = at.b * a.from.batch + row_[i] * a.from.row;
      if (tile.row + row + i * kRowStep >= a.all_rows) row_[i] = kNowhere;
    }
#pragma unroll
    for (int i = 0; i < kRight; ++i) {
      const int n = row + i * kRowStep;
      low_[i] = n < tile.cols ? (tile.col + n) / block_.group * block_.group : kNowhere;
    }
  }

  __device__ __forceinline__ void fill_left(uint32_t s_left, const Step<Shape>& step) const {
    const int row = threadIdx.x / 8, piece = threadIdx.x % 8;
    const bool live = step.channel + piece * Shape::kPerPiece < tile_.end;
    const T* const from = from_ + step.tap * a_.from.row + step.channel;
#pragma unroll
    for (int i = 0; i < kLeft; ++i) {
      if (kLeftRows % kRowStep != 0 && row + i * kRowStep >= kLeftRows) break;
      const auto r = static_cast<unsigned>(row_[i] + step.tap);
      const bool in = live && r < static_cast<unsigned>(a_.from_rows);
      ptx::cp_async_16(s_left + Shape::Left::offset(row + i * kRowStep, piece),
                       in ? from + offset_[i] : from_, in ? 16 : 0);
    }
  }

  __device__ __forceinline__ void fill_right(uint32_t s_right, const Step<Shape>& step) const {
    const int row = threadIdx.x / 8, piece = threadIdx.x % 8;
    const T* const weight = static_cast<const T*>(block_.weight);
    const T* const from =
        weight + (int64_t{step.tap} * block_.channels + tile_.col + row) * block_.group;
#pragma unroll
    for (int i = 0; i < kRight; ++i) {
      const int local = step.channel + piece * Shape::kPerPiece - low_[i];
      const bool in = static_cast<unsigned>(local) < static_cast<unsigned>(block_.group);
      ptx::cp_async_16(s_right + Shape::Right::offset(row + i * kRowStep, piece),
                       in ? from + i * kRowStep * block_.group + local : weight, in ? 16 : 0);
    }
  }

 private:
  static constexpr int kNowhere = -(1 << 30);
  const TapProduct& a_;
  const TapBlock& block_;
  const TileAt& tile_;
  const T* from_;
  int64_t offset_[kLeft];  // of `from`, without the tap
  int row_[kLeft];
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

// kStore and kCouple. A thread has eight columns of some rows.
template <typename Shape, typename Tile, typename RowOf>
__device__ void end_rows(const TapProduct& a, const Tile& tile, const float* s_sums,
                         const RowOf& row_of) {
  using T = typename Shape::T;
  const TapBlock& block = a.block[tile.block];
  constexpr int kPieces = Shape::kCols / 8, kRowStep = Shape::kThreads / kPieces;
  const int col = threadIdx.x % kPieces * 8;
  if (col >= tile.cols) return;
  const int channel = block.first + tile.col + col, dim = a.finish.coupling.dim;
  const int head = a.ending == Ending::kCouple ? channel / dim : 0;
  const T* const bias = static_cast<const T*>(block.bias);
  const Eight own_bias = bias != nullptr ? load_eight_apart(bias + tile.col + col) : Eight{};
#pragma unroll 2
  for (int r = threadIdx.x / kPieces; r < Shape::kRows; r += kRowStep) {
    const TokenAt row = row_of(r);
    if (!row.is) continue;
    Eight x = load_eight(s_sums + r * Shape::kPitch + col);
    add(x, own_bias);
    if (a.ending == Ending::kCouple) {
      add(x, a.finish.coupling.template share<T>(row.token, row.at, head, channel - head * dim));
    }
    store_eight(a.to.template at<T>(row.at.b, row.at.r) + channel, x);
  }
}

// kGrouped: groups are narrower than a block's channels.
template <typename Shape, bool kGrouped>
__global__ void __launch_bounds__(Shape::kThreads, 2)
    tap_product_kernel(const __grid_constant__ TapProduct a) {
  using T = typename Shape::T;
  extern __shared__ __align__(128) std::byte shared[];
  const uint32_t s_left = ptx::shared_address(shared);
  const uint32_t s_right = s_left + Shape::kStages * Shape::Left::kBytes;
  const TileAt tile(a, Shape::kRows);
  const TapBlock& block = a.block[tile.block];
  const int warp = threadIdx.x / 32;
  const int row = warp / 4 * Shape::kWarpRows, col = warp % 4 * Shape::kWarpCols;
  const int chunks = (tile.end - tile.begin + Shape::kDepth - 1) / Shape::kDepth;
  const int steps = chunks * a.taps;
  const TapLoader<Shape> loader(a, tile);
  Step<Shape> loaded(tile), step(tile);
  const auto load = [&] {
    if (loaded.brings_rows()) {
      loader.fill_left(s_left + loaded.left * Shape::Left::kBytes, loaded);
    }
    loader.fill_right(s_right + loaded.right * Shape::Right::kBytes, loaded);
    loaded.next(a, tile);
  };
  ptx::wait_for_earlier_kernels();

#pragma unroll
  for (int s = 0; s < Shape::kStages - 1; ++s) {
    if (s < steps) load();
    ptx::cp_async_commit();
  }
  ptx::Fragment sum[Shape::kM][Shape::kN];
  tile::clear(sum);
  const GroupsOfColumns<Shape::kN> groups(tile.col + col, block.group);
  for (int s = 0; s < steps; ++s) {
    ptx::cp_async_wait<Shape::kStages - 2>();
    __syncthreads();
    if (s + Shape::kStages - 1 < steps) load();
    ptx::cp_async_commit();
    add_dots<T, kGrouped, typename Shape::Left, typename Shape::Right>(
        sum, s_left + step.left * Shape::Left::kBytes, row + step.tap % Shape::kTaps,
        s_right + step.right * Shape::Right::kBytes, col, step.channel, groups);
    step.next(a, tile);
  }
  ptx::cp_async_wait<0>();
  __syncthreads();

  float* const s_sums = reinterpret_cast<float*>(shared);
  store_sums<Shape>(s_sums, row, col, sum);
  __syncthreads();
  const auto row_of = [&](int r) {
    const int number = tile.row + r;
    const RowAt at(number, a.span);
    return TokenAt{at.b * a.rows + at.r, at, number < a.all_rows && at.r < a.rows};
  };
  if (a.ending == Ending::kFinish) {
    const T* const bias = static_cast<const T*>(block.bias);
    a.finish.heads<T>(s_sums, Shape::kPitch, Shape::kRows, block.first + tile.col, tile.cols,
                      bias != nullptr ? bias + tile.col : nullptr, row_of);
  } else {
    end_rows<Shape>(a, tile, s_sums, row_of);
  }
}

}  // namespace fovea::layers::cuda
