// As head_conv.cuh, for many rows: a warp keeps the weights of its columns in registers, and a
// block goes from one tile of rows to the next, of which the rows come while it is busy with these.
#pragma once

#include "layers/cuda/head_conv.cuh"

namespace fovea::layers::cuda {

// Heads of kGroup channels, a multiple of 16, and kTaps taps.
template <typename T_, int kGroup_>
struct HeadRowsShape {
  using T = T_;
  static constexpr int kGroup = kGroup_, kTaps = 3, kSteps = kGroup / 16;
  static constexpr int kRows = 64, kCols = 128, kThreads = kCols / 16 * 32, kM = kRows / 16;
  static constexpr int kPitch = kCols + kRowPadding;  // of rows and of sums
  static constexpr int kRowBytes = (kRows + kTaps - 1) * kPitch * 2;
  static constexpr int kSharedBytes = 2 * kRowBytes + kRows * kPitch * 4;
};

// The columns that a block makes.
struct HeadTile {
  int block, col, cols;
};

// The weights that a warp multiplies with: those of 16 columns, as operands of mma.
template <typename Shape, bool kBackward>
struct WarpWeights {
  using T = typename Shape::T;
  uint32_t b[Shape::kTaps][Shape::kSteps][2][2];  // tap, step, eight columns, half of the depth

  // Of columns `first` on, from weights [channels, group, taps].
  __device__ __forceinline__ WarpWeights(const T* weight, int first) {
    constexpr int kTaps = Shape::kTaps, kGroup = Shape::kGroup;
    const int lane = threadIdx.x % 32, head = first / kGroup * kGroup;
#pragma unroll
    for (int y = 0; y < 2; ++y) {
      const int n = first + y * 8 + lane / 4;
      // Backward, outputs are the inputs of weights.
      const T* const from = kBackward ? weight + (int64_t{head} * kGroup + n - head) * kTaps
                                      : weight + int64_t{n} * kGroup * kTaps;
      constexpr int kStep = kBackward ? kGroup * kTaps : kTaps;
#pragma unroll
      for (int tap = 0; tap < kTaps; ++tap) {
#pragma unroll
        for (int k = 0; k < Shape::kSteps; ++k) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const T* const at = from + (k * 16 + half * 8 + lane % 4 * 2) * kStep +
                                (kBackward ? kTaps - 1 - tap : tap);
            b[tap][k][y][half] = pair_of(at, at + kStep);
          }
        }
      }
    }
  }
};

template <typename Shape, bool kBackward>
__global__ void __launch_bounds__(Shape::kThreads, 2)
    head_rows_kernel(const __grid_constant__ HeadConv conv) {
  using T = typename Shape::T;
  extern __shared__ __align__(128) std::byte shared[];
  float* const s_sums = reinterpret_cast<float*>(shared + 2 * Shape::kRowBytes);
  const TapProduct& a = conv.product;
  const int across = a.col_tiles[0] + (a.blocks > 1 ? a.col_tiles[1] : 0);
  const int column = static_cast<int>(blockIdx.x) % across;
  const int step = static_cast<int>(gridDim.x) / across;
  HeadTile tile;
  tile.block = column >= a.col_tiles[0];
  const TapBlock& block = a.block[tile.block];
  tile.col = (column - (tile.block != 0 ? a.col_tiles[0] : 0)) * Shape::kCols;
  tile.cols = min(Shape::kCols, block.channels - tile.col);
  ptx::wait_for_earlier_kernels();

  constexpr int kPieces = Shape::kCols / 8, kRowStep = Shape::kThreads / kPieces;
  const int own = threadIdx.x % kPieces * 8;
  const auto load = [&](int n, int stage) {
    T* const s_x = reinterpret_cast<T*>(shared + stage * Shape::kRowBytes);
    for (int r = threadIdx.x / kPieces; r < Shape::kRows + Shape::kTaps - 1; r += kRowStep) {
      const int number = n * Shape::kRows + r;
      const RowAt at(number, a.span);
      const int row = at.r + a.first_row;
      const bool in = number < a.all_rows && row >= 0 && row < a.from_rows && own < tile.cols;
      const T* const from = a.from.template at<T>(in ? at.b : 0, in ? row : 0) + block.first +
                            (in ? tile.col + own : 0);
      ptx::cp_async_16(ptx::shared_address(s_x + r * Shape::kPitch + own), from, in ? 16 : 0);
    }
  };
  int n = static_cast<int>(blockIdx.x) / across, stage = 0;
  if (n < a.row_tiles) load(n, 0);
  ptx::cp_async_commit();
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16;
  const bool live = first < tile.cols;
  const WarpWeights<Shape, kBackward> weights(static_cast<const T*>(block.weight),
                                              tile.col + (live ? first : 0));
  for (; n < a.row_tiles; n += step, stage ^= 1) {
    if (n + step < a.row_tiles) load(n + step, stage ^ 1);
    ptx::cp_async_commit();
    ptx::cp_async_wait<1>();
    __syncthreads();
    if (live) {
      const T* const x = reinterpret_cast<const T*>(shared + stage * Shape::kRowBytes) +
                         lane % 16 * Shape::kPitch + first / Shape::kGroup * Shape::kGroup +
                         lane / 16 * 8;
      ptx::Fragment sum[2][Shape::kM] = {};
#pragma unroll
      for (int tap = 0; tap < Shape::kTaps; ++tap) {
#pragma unroll
        for (int k = 0; k < Shape::kSteps; ++k) {
#pragma unroll
          for (int m = 0; m < Shape::kM; ++m) {
            uint32_t operand[4];
            ptx::ldmatrix_x4(operand,
                             ptx::shared_address(x + (m * 16 + tap) * Shape::kPitch + k * 16));
#pragma unroll
            for (int y = 0; y < 2; ++y) {
              ptx::mma_m16n8k16<T>(sum[y][m], operand, weights.b[tap][k][y][0],
                                   weights.b[tap][k][y][1]);
            }
          }
        }
      }
#pragma unroll
      for (int y = 0; y < 2; ++y) {
#pragma unroll
        for (int m = 0; m < Shape::kM; ++m) {
          store_fragment(s_sums, Shape::kPitch, first + y * 8, m, sum[y][m]);
        }
      }
    }
    __syncthreads();
    end_rows<Shape>(a, tile, s_sums, [&](int r) {
      const int number = n * Shape::kRows + r;
      const RowAt at(number, a.span);
      return TokenAt{at.b * a.rows + at.r, at, number < a.all_rows && at.r < a.rows};
    });
  }
}

}  // namespace fovea::layers::cuda
