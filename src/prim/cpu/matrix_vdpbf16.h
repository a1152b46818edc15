// Products of bf16 blocks by VDPBF16PS, accumulated in float. See matrix.h for what the members
// mean, bf16_pairs.h for the operand layouts.
#pragma once

#include <immintrin.h>

#include "prim/cpu/bf16_pairs.h"

namespace fovea::FOVEA_ISA {

struct MatrixVdpbf16 : Bf16Pairs {
  static constexpr const char* kName = "bf16";
  static constexpr int kColumnAlign = 32;
  static constexpr int kRowAlign = 1;
  static constexpr int kDepthAlign = 32;
  static constexpr bool kOnePass = true;
  static constexpr int kSlotColumns = 64;
  static constexpr int kTileQ = 64;
  static constexpr int kCutTileQ = kTileQ;
  static constexpr int kTileKv = 256;
  static constexpr int kStreamRows = 4;
  static constexpr int kRowsPerTask = 512;
  static constexpr int kBackwardTileQ = 64;
  static constexpr int kBackwardTileKv = 256;
  static constexpr int kBackwardCutTileQ = kBackwardTileQ;
  static constexpr bool kProductsAreOperands = false;

  static void begin() {}
  static void end() {}

  template <bool kAccumulate>
  static void multiply(float* c, int64_t ldc, int rows, int cols, int depth, Left a, const Bf16* b,
                       int64_t b_depth_pad) {
    for (int n = 0; n < cols; n += 32, b += 32 * b_depth_pad) {
      const auto at = [&](int m) { return a.data + m * a.row; };
      const Bf16* const b1 = b + 16 * b_depth_pad;
      int m = 0;
      for (; m + 12 <= rows && m + 16 != rows; m += 12) {  // 16 left: 8 + 8 beats 12 + 4
        tile<12, kAccumulate>(c + m * ldc + n, ldc, depth, at(m), a.row, b, b1);
      }
      for (; m + 8 <= rows; m += 8) {
        tile<8, kAccumulate>(c + m * ldc + n, ldc, depth, at(m), a.row, b, b1);
      }
      for (; m + 4 <= rows; m += 4) {
        tile<4, kAccumulate>(c + m * ldc + n, ldc, depth, at(m), a.row, b, b1);
      }
      for (; m < rows; ++m) {
        tile<1, kAccumulate>(c + m * ldc + n, ldc, depth, at(m), a.row, b, b1);
      }
    }
  }

 private:
  // kRows x 32 of c: 2 kRows accumulators, two vectors of b and one of a.
  template <int kRows, bool kAccumulate>
  FOVEA_INLINE static void tile(float* c, int64_t ldc, int depth, const Bf16* a, int64_t lda,
                                const Bf16* b0, const Bf16* b1) {
    Vec acc[kRows][2];
    for (int r = 0; r < kRows; ++r) {
      acc[r][0] = kAccumulate ? load(c + r * ldc) : zero();
      acc[r][1] = kAccumulate ? load(c + r * ldc + 16) : zero();
    }
    for (int k = 0; k < depth; k += 2) {
      const __m512bh y0 = operand(_mm512_loadu_si512(b0 + k * 16));
      const __m512bh y1 = operand(_mm512_loadu_si512(b1 + k * 16));
      for (int r = 0; r < kRows; ++r) {
        int pair = 0;
        __builtin_memcpy(&pair, a + r * lda + k, sizeof(pair));
        const __m512bh x = operand(_mm512_set1_epi32(pair));
        acc[r][0] = _mm512_dpbf16_ps(acc[r][0], x, y0);
        acc[r][1] = _mm512_dpbf16_ps(acc[r][1], x, y1);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      store(c + r * ldc, acc[r][0]);
      store(c + r * ldc + 16, acc[r][1]);
    }
  }

  FOVEA_INLINE static __m512bh operand(__m512i x) { return reinterpret_cast<__m512bh>(x); }
};

}  // namespace fovea::FOVEA_ISA
