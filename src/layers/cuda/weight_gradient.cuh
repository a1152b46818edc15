// Gradients of convolutions' weights: sums over all rows, made in parts and then added in order.
//
//   part[tap][o][i] = sum over some rows r of dy[r][o] * x[r + tap][i], o and i of the same group
#pragma once

#include "layers/cuda/rows.cuh"
#include "prim/cuda/ptx/grid_dependency.cuh"
#include "prim/cuda/tile/products.cuh"

namespace fovea::layers::cuda {

struct GradientBlock {
  int first = 0, channels = 0, group = 0;
  float* parts = nullptr;  // [parts, taps, channels, group]
  int in_tiles = 0;        // of inputs that the groups of a tile of outputs may take
};

// Of one convolution.
struct WeightGradient {
  Rows dy, x;
  int taps = 1, all_rows = 0;  // of dy
  Divider rows;                // of a batch member
  int rows_of_part = 0;        // a multiple of a step's
  GradientBlock block[2];
  int tiles[2] = {};  // of each block, taps and all
  int parts = 0;

  int blocks() const { return (tiles[0] + tiles[1]) * parts; }
};

// Of both: the first one's blocks of threads, which have more to do, come first.
struct WeightGradients {
  int blocks = 0;
  WeightGradient of[2];
};

template <typename T_>
struct GradientShape {
  using T = T_;
  static constexpr int kTile = 128, kThreads = 256, kStages = 3;
  static constexpr int kDepth = sizeof(T) == 2 ? 64 : 32;  // rows of a step
  static constexpr int kPerChunk = 16 / int{sizeof(T)}, kChunks = kTile / kPerChunk;
  static constexpr int kM = 4, kN = 4;  // warps stand two by four
  using Tile = tile::SharedTile<T, kDepth, kTile>;
  static constexpr int kSharedBytes = kStages * 2 * Tile::kBytes;
};

// Brings rows of dy and of x, which begin at channels `out` and `in`, step by step.
template <typename Shape>
class GradientLoader {
  using T = typename Shape::T;
  static constexpr int kRowStep = Shape::kThreads / Shape::kChunks;
  static constexpr int kRows = Shape::kDepth / kRowStep;

 public:
  __device__ GradientLoader(const WeightGradient& a, const GradientBlock& block, int out, int in,
                            int tap, int begin, int end)
      : a_(a), next_(begin + static_cast<int>(threadIdx.x) / Shape::kChunks), end_(end) {
    const int chunk = threadIdx.x % Shape::kChunks * Shape::kPerChunk;
    take_dy_ = out + chunk < block.channels;
    take_x_ = in + chunk < block.channels;
    dy_ = static_cast<const T*>(a.dy.data) + block.first + out + chunk;
    x_ = static_cast<const T*>(a.x.data) + tap * a.x.row + block.first + in + chunk;
  }

  __device__ __forceinline__ void fill(uint32_t s_dy, uint32_t s_x) {
    const int row = threadIdx.x / Shape::kChunks, chunk = threadIdx.x % Shape::kChunks;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool in = next_ < end_;
      const RowAt from(next_, a_.rows);
      const uint32_t at = Shape::Tile::offset(row + i * kRowStep, chunk);
      const bool dy = in && take_dy_, x = in && take_x_;
      ptx::cp_async_16(s_dy + at, dy ? dy_ + from.b * a_.dy.batch + from.r * a_.dy.row : dy_,
                       dy ? 16 : 0);
      ptx::cp_async_16(s_x + at, x ? x_ + from.b * a_.x.batch + from.r * a_.x.row : x_, x ? 16 : 0);
      next_ += kRowStep;
    }
  }

 private:
  const WeightGradient& a_;
  const T *dy_, *x_;
  bool take_dy_, take_x_;
  int next_, end_;  // rows
};

// As tile::add_columns_by_rows, of floats.
template <typename Tile, int kM, int kN>
__device__ __forceinline__ void add_float_columns(ptx::Fragment (&sum)[kM][kN], uint32_t s_a,
                                                  int col_a, uint32_t s_b, int col_b) {
  const int lane = threadIdx.x % 32;
#pragma unroll 2
  for (int k = 0; k < Tile::kRows; ++k) {
    const uint32_t row_a = s_a + Tile::offset(k, 0) + (col_a + lane / 4) * 4;
    const uint32_t row_b = s_b + Tile::offset(k, 0) + (col_b + lane % 4 * 2) * 4;
    float a[2 * kM];
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) a[r] = tile::load_float(row_a + r * 32);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float2 b = tile::load_float2(row_b + n * 32);
#pragma unroll
      for (int r = 0; r < 2 * kM; ++r) {
        sum[r / 2][n][r % 2 * 2] = fmaf(a[r], b.x, sum[r / 2][n][r % 2 * 2]);
        sum[r / 2][n][r % 2 * 2 + 1] = fmaf(a[r], b.y, sum[r / 2][n][r % 2 * 2 + 1]);
      }
    }
  }
}

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 2)
    weight_gradients_kernel(const __grid_constant__ WeightGradients both) {
  using T = typename Shape::T;
  using Tile = typename Shape::Tile;
  extern __shared__ __align__(128) std::byte shared[];
  const uint32_t s_stages = ptx::shared_address(shared);
  ptx::wait_for_earlier_kernels();
  int id = static_cast<int>(blockIdx.x);
  const int of_first = (both.of[0].tiles[0] + both.of[0].tiles[1]) * both.of[0].parts;
  const WeightGradient& a = both.of[id >= of_first];
  if (id >= of_first) id -= of_first;
  const int tiles = a.tiles[0] + a.tiles[1], part = id / tiles;
  id -= part * tiles;
  const GradientBlock& block = a.block[id >= a.tiles[0]];
  if (id >= a.tiles[0]) id -= a.tiles[0];
  const int tap = id % a.taps, tile = id / a.taps;
  const int out = tile / block.in_tiles * Shape::kTile;
  const int last = min(out + Shape::kTile, block.channels) - 1;  // of the outputs
  const int in = out / block.group * block.group + tile % block.in_tiles * Shape::kTile;
  if (in > last / block.group * block.group + block.group - 1) return;

  const int begin = part * a.rows_of_part, end = min(begin + a.rows_of_part, a.all_rows);
  const int steps = (end - begin + Shape::kDepth - 1) / Shape::kDepth;
  GradientLoader<Shape> loader(a, block, out, in, tap, begin, end);
  const auto dy_of = [&](int stage) { return s_stages + stage * 2 * Tile::kBytes; };
#pragma unroll
  for (int s = 0; s < Shape::kStages - 1; ++s) {
    if (s < steps) loader.fill(dy_of(s), dy_of(s) + Tile::kBytes);
    ptx::cp_async_commit();
  }
  ptx::Fragment sum[Shape::kM][Shape::kN];
  tile::clear(sum);
  const int warp = threadIdx.x / 32, row = warp / 4 * 64, col = warp % 4 * 32;
  int stage = 0, next = Shape::kStages - 1;
  for (int step = 0; step < steps; ++step) {
    ptx::cp_async_wait<Shape::kStages - 2>();
    __syncthreads();
    if (step + Shape::kStages - 1 < steps) loader.fill(dy_of(next), dy_of(next) + Tile::kBytes);
    ptx::cp_async_commit();
    if constexpr (sizeof(T) == 4) {
      add_float_columns<Tile>(sum, dy_of(stage), row, dy_of(stage) + Tile::kBytes, col);
    } else {
      tile::add_columns_by_rows<T, false, Tile, Tile>(sum, dy_of(stage), row,
                                                      dy_of(stage) + Tile::kBytes, col);
    }
    stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
    next = next + 1 == Shape::kStages ? 0 : next + 1;
  }

  // Columns 8 n + 2 (lane % 4) and the next are of the same group, as groups are multiples of 8.
  const int lane = threadIdx.x % 32;
  float* const to = block.parts + (int64_t{part} * a.taps + tap) * block.channels * block.group;
#pragma unroll
  for (int m = 0; m < Shape::kM; ++m) {
#pragma unroll
    for (int y = 0; y < 2; ++y) {
      const int o = out + row + m * 16 + y * 8 + lane / 4;
      const int low = o / block.group * block.group;
#pragma unroll
      for (int n = 0; n < Shape::kN; ++n) {
        const int local = in + col + n * 8 + lane % 4 * 2 - low;
        if (o < block.channels && local >= 0 && local < block.group) {
          *reinterpret_cast<float2*>(to + int64_t{o} * block.group + local) = {
              sum[m][n][2 * y], sum[m][n][2 * y + 1]};
        }
      }
    }
  }
}

}  // namespace fovea::layers::cuda
