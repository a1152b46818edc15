// Sums over rows that are no products of matrices: of biases and of channels by themselves; and the
// addition of parts that other kernels left.
#pragma once

#include "layers/cuda/rows.cuh"
#include "prim/cuda/ptx/grid_dependency.cuh"

namespace fovea::layers::cuda {

constexpr int kSumThreads = 256;

// parts[part][tap][c] = sum over rows of dy[r][c] * x[r + tap][c]; without x, of dy alone.
struct ColumnSum {
  Rows dy, x;
  int taps = 0;  // 0: without x
  int channels = 0, all_rows = 0;
  Divider rows;
  float* parts = nullptr;  // [parts, taps or 1, channels]
  int tiles = 0;           // of columns, for each tap
};

struct ColumnSums {
  int count = 0, parts = 0;
  ColumnSum sum[3];
};

constexpr int kColumnsOfTile = 64;

template <typename T>
__global__ void __launch_bounds__(kSumThreads, 4)
    column_sums_kernel(const __grid_constant__ ColumnSums a) {
  constexpr int kPieces = kColumnsOfTile / 8, kRowStep = kSumThreads / kPieces;
  __shared__ float s_sums[kRowStep][kColumnsOfTile + 1];
  ptx::wait_for_earlier_kernels();
  int id = static_cast<int>(blockIdx.x), n = 0;
  while (id >= a.sum[n].tiles) id -= a.sum[n++].tiles;
  const ColumnSum& s = a.sum[n];
  const int each = max(s.taps, 1), tap = id % each, first = id / each * kColumnsOfTile;
  const int piece = threadIdx.x % kPieces * 8, own = threadIdx.x / kPieces;
  const int rows_of_part = (s.all_rows + a.parts - 1) / a.parts;
  const int part = static_cast<int>(blockIdx.y), begin = part * rows_of_part;
  const int end = min(begin + rows_of_part, s.all_rows);
  Eight sum{};
  if (first + piece < s.channels) {
#pragma unroll 2
    for (int number = begin + own; number < end; number += kRowStep) {
      const RowAt at(number, s.rows);
      const Eight dy = load_eight(s.dy.at<T>(at.b, at.r) + first + piece);
      if (s.taps == 0) {
        add(sum, dy);
      } else {
        add_product(sum, dy, load_eight(s.x.at<T>(at.b, at.r + tap) + first + piece));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) s_sums[own][piece + i] = sum.x[i];
  __syncthreads();
  const int col = static_cast<int>(threadIdx.x), channel = first + col;
  if (col >= kColumnsOfTile || channel >= s.channels) return;
  float total = 0;
#pragma unroll
  for (int r = 0; r < kRowStep; ++r) total += s_sums[r][col];
  s.parts[(int64_t{part} * each + tap) * s.channels + channel] = total;
}

// to[i][tap] = sum over parts of from[part][tap][i]. Many parts of few sums (`wide`): a block for
// each sum.
struct PartSum {
  const float* from = nullptr;
  void* to = nullptr;
  int64_t count = 0;  // taps and all
  int taps = 1, parts = 0;
  bool wide = false;
  int blocks = 0;
};

constexpr int kMostPartSums = 8;
struct PartSums {
  int count = 0, blocks = 0;
  PartSum sum[kMostPartSums];

  // Parts that lie one after the other.
  void add(const float* from, void* to, int64_t of, int taps, int parts, bool wide = false) {
    const int64_t need = wide ? of : (of + kSumThreads - 1) / kSumThreads;
    sum[count++] = {from, to, of, taps, parts, wide, static_cast<int>(need)};
    blocks += static_cast<int>(need);
  }
};

template <typename T>
__global__ void __launch_bounds__(kSumThreads)
    part_sums_kernel(const __grid_constant__ PartSums a) {
  __shared__ float s_sums[kSumThreads / 32];
  ptx::wait_for_earlier_kernels();
  int id = static_cast<int>(blockIdx.x), n = 0;
  while (id >= a.sum[n].blocks) id -= a.sum[n++].blocks;
  const PartSum& s = a.sum[n];
  T* const to = static_cast<T*>(s.to);
  float sum = 0;
  if (!s.wide) {
    // Weights are fewer than 2^32.
    const unsigned i = static_cast<unsigned>(id) * kSumThreads + threadIdx.x;
    const auto count = static_cast<unsigned>(s.count), taps = static_cast<unsigned>(s.taps);
    if (i >= count) return;
    const float* const from = s.from + i % taps * (count / taps) + i / taps;
#pragma unroll 16
    for (int part = 0; part < s.parts; ++part) sum += from[part * s.count];
    to[i] = ptx::from_float<T>(sum);
    return;
  }
#pragma unroll 4
  for (int part = threadIdx.x; part < s.parts; part += kSumThreads) {
    sum += s.from[part * s.count + id];
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (threadIdx.x % 32 == 0) s_sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kSumThreads / 32; ++w) sum += s_sums[w];
  to[id] = ptx::from_float<T>(sum);
}

}  // namespace fovea::layers::cuda
