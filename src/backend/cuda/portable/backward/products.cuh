// The products of a backward block, on fragments: scores of two tiles of rows in shared memory, and
// sums of weighted rows.
#pragma once

#include "backend/cuda/portable/forward/nonfinite.cuh"
#include "prim/cuda/ptx/mma.cuh"
#include "prim/cuda/tile/shared_tile.cuh"

namespace fovea::cuda {

template <int kM, int kN>
__device__ __forceinline__ void clear(ptx::Fragment (&c)[kM][kN]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int x = 0; x < 4; ++x) c[m][n][x] = 0;
    }
  }
}

// c[m] = A rows (row_a + 16 m ..) . B rows (row_b ..row_b + 15), over all columns.
template <typename T, typename TileA, typename TileB, int kM>
__device__ __forceinline__ void dot_rows(ptx::Fragment (&c)[kM][2], uint32_t s_a, int row_a,
                                         uint32_t s_b, int row_b) {
  clear(c);
  const auto a_at = TileA::Lane::rows_first();
  const auto b_at = TileB::Lane::columns_first();
#pragma unroll
  for (int d = 0; d < TileA::kCols; d += 16) {
    uint32_t b[4];
    ptx::ldmatrix_x4(b, s_b + b_at.at(row_b, d));
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      uint32_t a[4];
      ptx::ldmatrix_x4(a, s_a + a_at.at(row_a + 16 * m, d));
      ptx::mma_m16n8k16<T>(c[m][0], a, b[0], b[1]);
      ptx::mma_m16n8k16<T>(c[m][1], a, b[2], b[3]);
    }
  }
}

// An accumulator of 16 columns as the A operand of the next product.
template <typename T>
__device__ __forceinline__ void as_operand(uint32_t (&a)[4], const ptx::Fragment (&c)[2]) {
  a[0] = ptx::pack<T>(c[0][0], c[0][1]);
  a[1] = ptx::pack<T>(c[0][2], c[0][3]);
  a[2] = ptx::pack<T>(c[1][0], c[1][1]);
  a[3] = ptx::pack<T>(c[1][2], c[1][3]);
}

// sum[m] += weights[m] (16 columns) x rows (row_b .. row_b + 15) of B. `dirty`: the tile may hold
// values that are not finite and must not meet weights of zero.
template <typename T, typename TileB, int kM, int kN>
__device__ __forceinline__ void add_weighted_rows(ptx::Fragment (&sum)[kM][kN],
                                                  const ptx::Fragment (&weights)[kM][2],
                                                  uint32_t s_b, int row_b, bool dirty) {
  uint32_t a[kM][4];
#pragma unroll
  for (int m = 0; m < kM; ++m) as_operand<T>(a[m], weights[m]);
  const auto b_at = TileB::Lane::rows_first();
#pragma unroll
  for (int n = 0; n < kN; n += 2) {
    uint32_t b[4];
    ptx::ldmatrix_x4_trans(b, s_b + b_at.at(row_b, n * 8));
    if (dirty) {
#pragma unroll
      for (int x = 0; x < 4; ++x) b[x] = finite_pair<T>(b[x]);
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      ptx::mma_m16n8k16<T>(sum[m][n], a[m], b[0], b[1]);
      ptx::mma_m16n8k16<T>(sum[m][n + 1], a[m], b[2], b[3]);
    }
  }
}

// For the whole block: whether a tile holds a value that is not finite.
template <typename Tile, typename T>
__device__ __forceinline__ bool holds_nonfinite(uint32_t shared, int threads) {
  bool found = false;
  for (int at = threadIdx.x * 16; at < Tile::kBytes; at += threads * 16) {
    uint32_t w[4];
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(shared + at));
#pragma unroll
    for (int x = 0; x < 4; ++x) found |= finite_pair<T>(w[x]) != w[x];
  }
  return found;
}

// Rows of gradients from fragments to global memory: columns 2 (lane % 4) and the next of each 8.
template <typename T, int kN>
__device__ __forceinline__ void store_row(T* to, const ptx::Fragment (&sum)[kN], int x, float scale,
                                          int cols, bool vector) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const int col = n * 8 + threadIdx.x % 4 * 2;
    if (vector) {
      if (col < cols) {
        *reinterpret_cast<uint32_t*>(to + col) =
            ptx::pack<T>(sum[n][x] * scale, sum[n][x + 1] * scale);
      }
    } else {
      if (col < cols) to[col] = ptx::from_float<T>(sum[n][x] * scale);
      if (col + 1 < cols) to[col + 1] = ptx::from_float<T>(sum[n][x + 1] * scale);
    }
  }
}

}  // namespace fovea::cuda
