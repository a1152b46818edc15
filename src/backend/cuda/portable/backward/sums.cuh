// Gradients that several blocks add to: floats in the workspace, zeroed before and rounded to the
// tensors after. They lie as the fragments of a warp do, so that a warp adds 512 bytes in a row.
#pragma once

#include "backend/cuda/common/launch.cuh"
#include "backend/cuda/portable/backward/arguments.h"
#include "backend/cuda/portable/backward/config.h"
#include "backend/cuda/portable/loads.cuh"
#include "base/ceil_div.h"
#include "prim/cuda/ptx/grid_dependency.cuh"
#include "prim/cuda/ptx/math.cuh"
#include "prim/cuda/ptx/mma.cuh"
#include "prim/cuda/ptx/red.cuh"
#include "prim/cuda/tile/products.cuh"

namespace fovea::cuda {

// The first row of head `head` of `heads`, of a sequence of `rows` rows with `before` rows of its
// head in front of it: every head begins on a whole tile.
__device__ __forceinline__ int64_t sum_row(int64_t before, int b, int heads, int head, int rows) {
  constexpr int64_t kTile = BackwardConfig::kSumTile;
  return heads * (before / kTile + b) * kTile + head * ((rows + kTile - 1) / kTile * kTile);
}
__device__ __forceinline__ int64_t query_sum_row(const Problem& p, const Place& place) {
  const int64_t before = p.cu_q != nullptr ? place.s.q_row : int64_t{place.b} * p.q_len;
  return sum_row(before * p.group, place.b, p.head_kv, place.head_kv, p.group * place.s.q_len);
}
__device__ __forceinline__ int64_t key_sum_row(const Problem& p, const Place& place) {
  const int64_t before = p.cu_kv != nullptr ? place.s.kv_row : int64_t{place.b} * p.kv_len;
  return sum_row(before, place.b, p.head_kv, place.head_kv,
                 p.cu_kv != nullptr ? place.s.kv_len : p.kv_len);
}

// Adds the upper or lower 8 rows of a row of fragments.
template <int kN>
__device__ __forceinline__ void add_half(float4* to, const ptx::Fragment (&x)[kN], int half) {
#pragma unroll
  for (int n = 0; n < kN; n += 2) {
    ptx::red_add_4(to + n * 32, x[n][2 * half], x[n][2 * half + 1], x[n + 1][2 * half],
                   x[n + 1][2 * half + 1]);
  }
}

// A lane's four values of the upper 8 rows of the 16 x 16 block at (row, col), multiples of 16.
// Those of the lower rows lie 32 places on, the next columns' 64, the next rows' 4 kCols.
template <int kCols>
__device__ __forceinline__ float4* sum_at(float* sums, int64_t row, int col,
                                          int lane = threadIdx.x % 32) {
  return reinterpret_cast<float4*>(sums) + (row / 16 * (kCols / 16) + col / 16) * 64 + lane;
}

// Adds fragments, 16 kM rows x 8 kN columns, at (row, col).
template <int kCols, int kM, int kN>
__device__ __forceinline__ void add_to_sums(float* sums, int64_t row, int col,
                                            const ptx::Fragment (&x)[kM][kN],
                                            int lane = threadIdx.x % 32) {
  float4* const to = sum_at<kCols>(sums, row, col, lane);
#pragma unroll
  for (int r = 0; r < 2 * kM; ++r) add_half(to + r / 2 * 4 * kCols + r % 2 * 32, x[r / 2], r % 2);
}
template <int kCols, int kN>
__device__ __forceinline__ void add_to_sums(float* sums, int64_t row, int col,
                                            const ptx::Fragment (&x)[kN]) {
  float4* const to = sum_at<kCols>(sums, row, col);
#pragma unroll
  for (int half = 0; half < 2; ++half) add_half(to + half * 32, x, half);
}

// The same of a warp's keys, from row `row` on, of which `keys` are stored: where there are any,
// the sums have room for all, for they end with a whole tile of theirs. kOrder: of the keys in the
// fragments, not in the sums.
template <int kCols, tile::RowOrder kOrder = tile::RowOrder::kPlain, int kM, int kN>
__device__ __forceinline__ void add_key_sums(float* sums, int64_t row, int keys, int col,
                                             const ptx::Fragment (&x)[kM][kN]) {
  if (keys <= 0) return;
  if constexpr (kOrder == tile::RowOrder::kPlain) {
    add_to_sums<kCols>(sums, row, col, x);
  } else {
    // A lane's rows are neighbours, of which the first is a multiple of four.
    static_assert(kOrder == tile::RowOrder::kRunsOfFour && kM == 2);
    const int lane = threadIdx.x % 32, first = tile::row_in_order<kOrder>(lane / 4);
    float4* const to = sum_at<kCols>(sums, row + first / 16 * 16, col) + first / 8 % 2 * 32 +
                       (first % 8 - lane / 4) * 4;
#pragma unroll
    for (int r = 0; r < 4; ++r) add_half(to + r * 4, x[r / 2], r % 2);
  }
}

// A warp's keys, from `key` on, that no other block adds to: rounded at once.
template <typename T, int kM, int kN>
__device__ __forceinline__ void store_key_rows(const Rows& t, const Place& place, int key,
                                               int stored_keys, const ptx::Fragment (&x)[kM][kN],
                                               float scale, int cols, bool pairs) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = key + m * 16 + half * 8 + threadIdx.x % 32 / 4;
      if (at >= stored_keys) continue;
      tile::store_row(rows_at<T>(t, place.s, place.s.kv_row + at, place.head_kv), x[m], 2 * half,
                      scale, cols, pairs);
    }
  }
}

// Rounds one tile of sums into the rows that row_pointer names.
template <typename T, int kCols, typename RowPointer>
__device__ __forceinline__ void round_tile(const float* sums, int rows, RowPointer row_pointer,
                                           int cols, float scale, bool pairs) {
  constexpr int kSlots = BackwardConfig::kSumTile * kCols / 4;
  static_assert(kSlots % BackwardConfig::kSumThreads == 0);
#pragma unroll kCols <= 32 ? 4 : 1
  for (int n = 0; n < kSlots; n += BackwardConfig::kSumThreads) {
    const int slot = n + threadIdx.x;
    const int lane = slot % 32, half = slot / 32 % 2, block = slot / 64;
    const int row = block / (kCols / 16) * 16 + half * 8 + lane / 4;
    if (row >= rows) continue;
    const float4 x = reinterpret_cast<const float4*>(sums)[slot];
    T* const to = row_pointer(row);
    const int col = block % (kCols / 16) * 16 + lane % 4 * 2;
    const auto put = [&](int at, float first, float second) {
      if (pairs && at + 1 < cols) {
        *reinterpret_cast<uint32_t*>(to + at) = ptx::pack<T>(first * scale, second * scale);
      } else {
        if (at < cols) to[at] = ptx::from_float<T>(first * scale);
        if (at + 1 < cols) to[at + 1] = ptx::from_float<T>(second * scale);
      }
    };
    put(col, x.x, x.y);
    put(col + 8, x.z, x.w);
  }
}

// dq, and dk and dv where they were summed too: first the blocks of queries, then those of keys.
template <typename T, int kDimQk, int kDimV>
__global__ void __launch_bounds__(BackwardConfig::kSumThreads)
    round_sums_kernel(const __grid_constant__ BackwardArguments a) {
  ptx::let_next_kernel_begin();
  ptx::wait_for_earlier_kernels();
  constexpr int kTile = BackwardConfig::kSumTile;
  const Problem& p = a.p;
  const int q_tiles = (p.group * p.q_len + kTile - 1) / kTile;
  const int tile = a.of_heads(blockIdx.x), head = blockIdx.x - tile * (a.batch * p.head_kv);
  const bool keys = tile >= q_tiles;
  const int first = (keys ? tile - q_tiles : tile) * kTile;
  Place place;
  place.b = a.of_head_kv(head);
  place.head_kv = head - place.b * p.head_kv;
  place.s = sequence_at(p, place.b);
  if (!keys) {
    const int rows = p.group * place.s.q_len - first;
    if (rows <= 0) return;
    const RowSpan span = RowSpan::at(place.s, first, min(rows, kTile));
    T* const base = rows_at<T>(a.dq, place.s, place.s.q_row, place.head_kv * p.group);
    round_tile<T, kDimQk>(
        a.dq_sum + (query_sum_row(p, place) + first) * kDimQk, rows,
        [&](int r) {
          const Row row = span.of(place.s, r);
          return base + row.head * a.dq.head + row.i * a.dq.row;
        },
        p.dim_qk, p.scale, a.vector_dq);
    return;
  }
  // Dense rows past a key length exist; packed ones belong to the next sequence.
  const int rows = (p.cu_kv != nullptr ? place.s.kv_len : p.kv_len) - first;
  if (rows <= 0) return;
  const int64_t at = key_sum_row(p, place) + first;
  T* const dk = rows_at<T>(a.dk, place.s, place.s.kv_row + first, place.head_kv);
  T* const dv = rows_at<T>(a.dv, place.s, place.s.kv_row + first, place.head_kv);
  round_tile<T, kDimQk>(
      a.dk_sum + at * kDimQk, rows, [&](int r) { return dk + r * a.dk.row; }, p.dim_qk, p.scale,
      a.vector_dk);
  round_tile<T, kDimV>(
      a.dv_sum + at * kDimV, rows, [&](int r) { return dv + r * a.dv.row; }, p.dim_v, 1,
      a.vector_dv);
}

template <typename T, int kDimQk, int kDimV>
cudaError_t round_sums(const BackwardArguments& a, cudaStream_t stream) {
  const auto tiles = [](int64_t rows) { return ceil_div(rows, BackwardConfig::kSumTile); };
  const Problem& p = a.p;
  const int64_t heads = static_cast<int64_t>(a.batch) * p.head_kv;
  const int64_t blocks =
      heads * (tiles(int64_t{p.group} * p.q_len) + (a.row_parts > 1 ? tiles(p.kv_len) : 0));
  if (blocks == 0) return cudaSuccess;
  return launch<round_sums_kernel<T, kDimQk, kDimV>>(
      {dim3(static_cast<unsigned>(blocks)), BackwardConfig::kSumThreads, 0, stream}, a);
}

}  // namespace fovea::cuda
