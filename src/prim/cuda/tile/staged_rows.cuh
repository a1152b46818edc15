// Rows of sums on their way to global memory: rounded from fragments into a tile of shared memory,
// and written from there 16 bytes at a time. A block goes through this once, so that every
// instruction of it is fetched anew: it is kept short.
#pragma once

#include <vector_types.h>

#include "prim/cuda/ptx/math.cuh"
#include "prim/cuda/ptx/mma.cuh"
#include "prim/cuda/ptx/registers.cuh"
#include "prim/cuda/ptx/st_global.cuh"
#include "prim/cuda/tile/shared_tile.cuh"

namespace fovea::tile {

// A warp's fragments, times scale_of(2 m + half) of their halves, into a tile: rows from `row` on
// in kOrder, and columns from `col` on, multiples of 8.
template <typename T, typename Tile, RowOrder kOrder = RowOrder::kPlain, int kM, int kN,
          typename ScaleOf>
__device__ __forceinline__ void stage_rows(uint32_t shared, int row, int col,
                                           const ptx::Fragment (&x)[kM][kN], ScaleOf scale_of) {
  const int lane = static_cast<int>(ptx::renewed(threadIdx.x) % 32);  // no register to keep it in
#pragma unroll
  for (int r = 0; r < 2 * kM; ++r) {
    const float scale = scale_of(r);
    const int to_row = row + row_in_order<kOrder>(r * 8 + lane / 4);
    const auto pair = [&](int n) {
      return float2{x[r / 2][n][r % 2 * 2] * scale, x[r / 2][n][r % 2 * 2 + 1] * scale};
    };
    if constexpr (sizeof(T) == 4) {
      const int within = lane % 4 / 2;  // chunks of eight columns
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        store_float2(shared + Tile::offset(to_row, col / 4 + 2 * n + within) + lane % 2 * 8,
                     pair(n));
      }
    } else {
      const auto at = Tile::Lane::fragments(to_row);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float2 two = pair(n);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared + at.at(0, col + n * 8)),
                     "r"(ptx::pack<T>(two.x, two.y))
                     : "memory");
      }
    }
  }
}

// 16 bytes of a row, of which `count` values exist. `vector`: they begin on 16 bytes, and all do.
template <typename T>
__device__ __forceinline__ void store_staged(T* to, uint32_t shared, int count, bool vector) {
  if (vector) {
    ptx::store_16(to, load_16(shared));
    return;
  }
#pragma unroll 1  // rare
  for (int y = 0; y < 16 / int{sizeof(T)} && y < count; ++y) {
    if constexpr (sizeof(T) == 4) {
      reinterpret_cast<float*>(to)[y] = load_float(shared + 4 * y);
    } else {
      uint16_t bits;
      asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(shared + 2 * y));
      reinterpret_cast<uint16_t*>(to)[y] = bits;
    }
  }
}

// The first `rows` rows of a tile and `cols` columns of each, by all threads of a block, to where
// row_pointer(row) says.
template <typename T, typename Tile, int kThreads, typename RowPointer>
__device__ __forceinline__ void store_staged_rows(uint32_t shared, int rows, int cols, bool vector,
                                                  RowPointer row_pointer) {
#pragma unroll 1
  for (int x = threadIdx.x; x < Tile::kRows * Tile::kChunks; x += kThreads) {
    const int row = x / Tile::kChunks, chunk = x % Tile::kChunks, col = chunk * Tile::kPerChunk;
    if (row >= rows || col >= cols) continue;
    store_staged<T>(row_pointer(row) + col, shared + Tile::offset(row, chunk), cols - col, vector);
  }
}

}  // namespace fovea::tile
