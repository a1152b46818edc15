// Products of tiles in shared memory, on the fragments of a warp: 16-bit values and, as tf32,
// floats on tensor cores; floats by exact multiply-adds on the same fragments.
//
// A fragment [m][n] is 16 x 8: lane l holds rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the
// next.
#pragma once

#include <type_traits>

#include "prim/cuda/ptx/math.cuh"
#include "prim/cuda/ptx/mma.cuh"
#include "prim/cuda/tile/float_products.cuh"
#include "prim/cuda/tile/shared_tile.cuh"

namespace fovea::tile {

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

// Every value x of the fragments becomes f(x).
template <int kM, int kN, typename Function>
__device__ __forceinline__ void map(ptx::Fragment (&c)[kM][kN], Function f) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int x = 0; x < 4; ++x) c[m][n][x] = f(c[m][n][x]);
    }
  }
}

// c += a b over 32 bytes of depth, which ldmatrix brings as 16 x 16 values of 16 bits.
constexpr int kDepthBytes = 32;
template <typename T>
__device__ __forceinline__ void multiply(ptx::Fragment& c, const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  if constexpr (std::is_same_v<T, ptx::TensorFloat>) {
    ptx::mma_m16n8k8_tf32(c, a, b0, b1);
  } else {
    ptx::mma_m16n8k16<T>(c, a, b0, b1);
  }
}

// What ldmatrix brought of a right operand, as it is multiplied.
template <typename T>
__device__ __forceinline__ void round_operand(uint32_t (&x)[4]) {
  if constexpr (std::is_same_v<T, ptx::TensorFloat>) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = ptx::round_to_tf32(__uint_as_float(x[i]));
  }
}

// c[m][n] += rows row_a + 16 m .. of A times rows row_b + 8 n .. of B, over all columns.
template <typename T, typename TileA, typename TileB, int kM, int kN>
__device__ __forceinline__ void add_dot_rows(ptx::Fragment (&c)[kM][kN], uint32_t s_a, int row_a,
                                             uint32_t s_b, int row_b) {
  if constexpr (std::is_same_v<T, float>) {
    add_dot_rows_exactly<TileA, TileB>(c, s_a, row_a, s_b, row_b);
  } else {
    const auto a_at = TileA::Lane::rows_first();
    const auto b_at = TileB::Lane::columns_first();
#pragma unroll
    for (int d = 0; d < TileA::kCols * int{sizeof(T)} / kDepthBytes; ++d) {
      uint32_t a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) ptx::ldmatrix_x4(a[m], s_a + a_at.at(row_a + 16 * m, d * 16));
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, s_b + b_at.at(row_b + n * 8, d * 16));
        round_operand<T>(b);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          multiply<T>(c[m][n], a[m], b[0], b[1]);
          multiply<T>(c[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }
}

// The same with A in registers, as rows_of_tile loaded it. `meanwhile` is called before the last
// piece of depth.
struct Nothing {
  __device__ __forceinline__ void operator()() const {}
};
template <typename T, typename TileB, int kM, int kD, int kN, typename Meanwhile = Nothing>
__device__ __forceinline__ void add_dot_fragments(ptx::Fragment (&c)[kM][kN],
                                                  const uint32_t (&a)[kM][kD][4], uint32_t s_b,
                                                  int row_b, Meanwhile meanwhile = {}) {
  const auto b_at = TileB::Lane::columns_first();
#pragma unroll
  for (int d = 0; d < kD; ++d) {
    if (d == kD - 1) meanwhile();
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, s_b + b_at.at(row_b + n * 8, d * 16));
      round_operand<T>(b);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        multiply<T>(c[m][n], a[m][d], b[0], b[1]);
        multiply<T>(c[m][n + 1], a[m][d], b[2], b[3]);
      }
    }
  }
}
template <typename T, typename TileB, int kM, int kD, int kN>
__device__ __forceinline__ void dot_fragments(ptx::Fragment (&c)[kM][kN],
                                              const uint32_t (&a)[kM][kD][4], uint32_t s_b,
                                              int row_b) {
  clear(c);
  add_dot_fragments<T, TileB>(c, a, s_b, row_b);
}
template <typename Tile, int kM, int kD>
__device__ __forceinline__ void rows_of_tile(uint32_t (&a)[kM][kD][4], uint32_t shared, int row) {
  const auto at = Tile::Lane::rows_first();
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int d = 0; d < kD; ++d) ptx::ldmatrix_x4(a[m][d], shared + at.at(row + 16 * m, d * 16));
  }
}

template <typename T, typename TileA, typename TileB, int kM, int kN>
__device__ __forceinline__ void dot_rows(ptx::Fragment (&c)[kM][kN], uint32_t s_a, int row_a,
                                         uint32_t s_b, int row_b) {
  clear(c);
  add_dot_rows<T, TileA, TileB>(c, s_a, row_a, s_b, row_b);
}

// A pair of 16-bit values, or a float, with those that are not finite made zero.
template <typename T>
__device__ __forceinline__ uint32_t finite_word(uint32_t word) {
  if constexpr (sizeof(T) == 4) {
    return (word & 0x7f800000u) == 0x7f800000u ? 0u : word;
  } else {
    constexpr uint32_t kExponent = std::is_same_v<T, __half> ? 0x7c00 : 0x7f80;
    if ((word & kExponent) == kExponent) word &= 0xffff0000u;
    if ((word >> 16 & kExponent) == kExponent) word &= 0x0000ffffu;
    return word;
  }
}
// The upper bit of each of a pair's halves: whether it is not finite. The other bits say nothing.
template <typename T>
__device__ __forceinline__ uint32_t nonfinite_bits(uint32_t pair) {
  constexpr uint32_t kLeastExponent = std::is_same_v<T, __half> ? 0x04000400u : 0x00800080u;
  return (pair & 0x7fff7fffu) + kLeastExponent;  // an exponent of ones overflows into the sign
}
constexpr uint32_t kNonfinite = 0x80008000u;

// The pairs of two neighbouring fragments, as the A operand with depth along their columns.
template <typename T>
__device__ __forceinline__ void pack_fragments(uint32_t (&a)[4], const ptx::Fragment& left,
                                               const ptx::Fragment& right) {
  a[0] = ptx::pack<T>(left[0], left[1]);
  a[1] = ptx::pack<T>(left[2], left[3]);
  a[2] = ptx::pack<T>(right[0], right[1]);
  a[3] = ptx::pack<T>(right[2], right[3]);
}

// sum[m] += weights[m] (8 kK columns) x rows row_b .. row_b + 8 kK - 1 of B. `dirty`: the tile may
// hold values that are not finite and must not meet weights of zero.
template <typename T, typename TileB, int kM, int kK, int kN>
__device__ __forceinline__ void add_weighted_rows(ptx::Fragment (&sum)[kM][kN],
                                                  const ptx::Fragment (&weights)[kM][kK],
                                                  uint32_t s_b, int row_b, bool dirty) {
  if constexpr (std::is_same_v<T, float>) {
    add_weighted_rows_exactly<TileB>(sum, weights, s_b, row_b, dirty);
  } else if constexpr (std::is_same_v<T, ptx::TensorFloat>) {
    add_weighted_rows_tf32<TileB>(sum, weights, s_b, row_b, dirty);
  } else {
    const auto b_at = TileB::Lane::rows_first();
#pragma unroll
    for (int k = 0; k < kK; k += 2) {
      uint32_t a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) pack_fragments<T>(a[m], weights[m][k], weights[m][k + 1]);
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, s_b + b_at.at(row_b + k * 8, n * 8));
        if (dirty) {
#pragma unroll
          for (int x = 0; x < 4; ++x) b[x] = finite_word<T>(b[x]);
        }
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          ptx::mma_m16n8k16<T>(sum[m][n], a[m], b[0], b[1]);
          ptx::mma_m16n8k16<T>(sum[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }
}

// sum[m] += rows row_a + 16 m .. of A times columns col_b .. of B: the depth is A's columns and B's
// rows. kClean: values of B that are not finite are left out, which is seldom: it need not be fast,
// and its code is short.
template <typename T, bool kClean, typename TileA, typename TileB, int kM, int kN>
__device__ __forceinline__ void add_rows_by_rows(ptx::Fragment (&sum)[kM][kN], uint32_t s_a,
                                                 int row_a, uint32_t s_b, int col_b) {
  static_assert(sizeof(T) == 2 && TileA::kCols == TileB::kRows);
  const auto a_at = TileA::Lane::rows_first();
  const auto b_at = TileB::Lane::rows_first();
#pragma unroll kClean ? 1 : TileA::kCols / 16
  for (int k = 0; k < TileA::kCols; k += 16) {
    uint32_t a[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) ptx::ldmatrix_x4(a[m], s_a + a_at.at(row_a + 16 * m, k));
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, s_b + b_at.at(k, col_b + n * 8));
      if constexpr (kClean) {
#pragma unroll
        for (int x = 0; x < 4; ++x) b[x] = finite_word<T>(b[x]);
      }
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        ptx::mma_m16n8k16<T>(sum[m][n], a[m], b[0], b[1]);
        ptx::mma_m16n8k16<T>(sum[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// sum[m] += columns col_a + 16 m .. of A as rows, times columns col_b .. of B: the depth is the
// rows of both. kClean: as above.
template <typename T, bool kClean, typename TileA, typename TileB, int kM, int kN>
__device__ __forceinline__ void add_columns_by_rows(ptx::Fragment (&sum)[kM][kN], uint32_t s_a,
                                                    int col_a, uint32_t s_b, int col_b) {
  static_assert(sizeof(T) == 2 && TileA::kRows == TileB::kRows);
  const auto a_at = TileA::Lane::columns_first();
  const auto b_at = TileB::Lane::rows_first();
#pragma unroll kClean ? 1 : TileA::kRows / 16
  for (int k = 0; k < TileA::kRows; k += 16) {
    uint32_t a[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) ptx::ldmatrix_x4_trans(a[m], s_a + a_at.at(k, col_a + 16 * m));
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, s_b + b_at.at(k, col_b + n * 8));
      if constexpr (kClean) {
#pragma unroll
        for (int x = 0; x < 4; ++x) b[x] = finite_word<T>(b[x]);
      }
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        ptx::mma_m16n8k16<T>(sum[m][n], a[m], b[0], b[1]);
        ptx::mma_m16n8k16<T>(sum[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Fragments into a tile of equal panels, 16-bit: rows from `row` on, columns from `col` on, both
// multiples of their fragment's. The tile begins on 128 bytes.
template <typename T, typename Tile, int kM, int kN>
__device__ __forceinline__ void store_fragments(uint32_t shared, int row, int col,
                                                const ptx::Fragment (&x)[kM][kN]) {
  static_assert(Tile::kCols % 64 == 0 || Tile::kCols == 32);
  const int lane = threadIdx.x % 32;
  const uint32_t first = shared + Tile::offset(row + lane / 4, col / 8) + lane % 4 * 4;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const uint32_t at = first ^ (n * 16);  // as chunks are exchanged, kN of them from a multiple on
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + (m * 16 + half * 8) * Tile::row_bytes(0)),
                     "r"(ptx::pack<T>(x[m][n][2 * half], x[m][n][2 * half + 1]))
                     : "memory");
      }
    }
  }
}

// This thread's share of a tile: whether it holds a value that is not finite.
template <typename T, typename Tile>
__device__ __forceinline__ bool holds_nonfinite(uint32_t shared, int threads) {
  bool found = false;
  for (int x = threadIdx.x; x < Tile::kRows * Tile::kChunks; x += threads) {
    const uint4 words = load_16(shared + Tile::offset(x / Tile::kChunks, x % Tile::kChunks));
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int y = 0; y < 4; ++y) found |= finite_word<T>(w[y]) != w[y];
  }
  return found;
}

// One row of fragments to global memory, scaled; x says which of the lane's two rows. `pairs`: two
// neighbouring values may be written at once.
template <typename T, int kN>
__device__ __forceinline__ void store_row(T* to, const ptx::Fragment (&sum)[kN], int x, float scale,
                                          int cols, bool pairs) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const int col = n * 8 + threadIdx.x % 4 * 2;
    const float first = sum[n][x] * scale, second = sum[n][x + 1] * scale;
    if (pairs && col + 1 < cols) {
      if constexpr (sizeof(T) == 4) {
        *reinterpret_cast<float2*>(to + col) = {first, second};
      } else {
        *reinterpret_cast<uint32_t*>(to + col) = ptx::pack<T>(first, second);
      }
    } else {
      if (col < cols) to[col] = ptx::from_float<T>(first);
      if (col + 1 < cols) to[col + 1] = ptx::from_float<T>(second);
    }
  }
}

}  // namespace fovea::tile
