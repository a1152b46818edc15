// The operand layouts that AMX tiles and VDPBF16PS share: bf16 with pairs along the contraction.
// Left operands are row-major; right operands are panels of 16 columns, [depth / 2][16][2] each.
#pragma once

#include "prim/cpu/simd_math.h"

namespace fovea::FOVEA_ISA {

struct Bf16Pairs {
  using Elem = Bf16;
  static constexpr Exp2 kExp2 = Exp2::kBf16;
  static constexpr int kPanel = 16;
  static constexpr bool kTransposedLeftIsAView = false;
  static constexpr bool kLeftIsSliced = false;
  static constexpr bool kLeftIsRows = true;

  struct Left {
    const Bf16* data;
    int64_t row;
  };
  static Left left(const Bf16* data, int64_t ld) { return {data, ld}; }
  static Left left_from(const Bf16* data, int64_t ld, int depth) { return {data + depth, ld}; }

  static void pack_left_row(Bf16* dst, int64_t ld, int row, const Bf16* src, int depth,
                            int depth_pad) {
    for (int d = 0; d < depth_pad; d += 32) {
      _mm512_storeu_si512(dst + row * ld + d, raw(src + d, depth - d));
    }
  }

  // Left operand whose rows are the columns of src: dst[c][r] = src[r][c]. A dword transpose of
  // pairs of rows does it: word (c, r / 2) of dst is what interleaving rows r and r + 1 puts at c.
  template <typename T>
  static void pack_left_transposed(Bf16* dst, int64_t ld, const Bf16* src, int64_t stride, int rows,
                                   int cols, int rows_pad, int cols_pad) {
    for (int r = 0; r < rows_pad; r += 32) {
      for (int c = 0; c < cols_pad; c += 32) {
        Vec low[16], high[16];
        for (int i = 0; i < 16; ++i) {
          const int row = r + 2 * i;
          const __m512i x =
              row < rows ? raw(src + row * stride + c, cols - c) : _mm512_setzero_si512();
          const __m512i y =
              row + 1 < rows ? raw(src + (row + 1) * stride + c, cols - c) : _mm512_setzero_si512();
          const Interleaved both = interleave(x, y);
          low[i] = _mm512_castsi512_ps(both.low);
          high[i] = _mm512_castsi512_ps(both.high);
        }
        transpose_lanes(low);
        transpose_lanes(high);
        for (int i = 0; i < 16; ++i) {
          store(reinterpret_cast<float*>(dst + (c + i) * ld + r), low[i]);
          store(reinterpret_cast<float*>(dst + (c + 16 + i) * ld + r), high[i]);
        }
      }
    }
  }

  template <typename T>
  static bool pack_right(Bf16* dst, const Bf16* src, int64_t stride, int depth, int depth_pad,
                         int cols) {
    __mmask32 bad = 0;
    for (int k = 0; k < depth_pad; k += 2) {
      for (int c = 0; c < cols; c += 32) {
        const __m512i x = k < depth ? raw(src + k * stride + c, cols - c) : _mm512_setzero_si512();
        const __m512i y =
            k + 1 < depth ? raw(src + (k + 1) * stride + c, cols - c) : _mm512_setzero_si512();
        bad |= nonfinite(x) | nonfinite(y);
        const Interleaved both = interleave(x, y);
        Bf16* const panel = dst + static_cast<int64_t>(c) * depth_pad + k * 16;
        _mm512_storeu_si512(panel, both.low);
        _mm512_storeu_si512(panel + static_cast<int64_t>(16) * depth_pad, both.high);
      }
    }
    return bad != 0;
  }

  template <typename T>
  static void pack_right_transposed(Bf16* dst, const Bf16* src, int64_t stride, int cols, int depth,
                                    int depth_pad) {
    for (int c = 0; c < round_up(cols, 32); c += 16) {
      Bf16* const panel = dst + static_cast<int64_t>(c) * depth_pad;
      for (int k = 0; k < depth_pad; k += 32) {
        Vec rows[16];
        for (int i = 0; i < 16; ++i) {
          rows[i] = _mm512_castsi512_ps(c + i < cols ? raw(src + (c + i) * stride + k, depth - k)
                                                     : _mm512_setzero_si512());
        }
        transpose_lanes(rows);
        for (int i = 0; i < 16; ++i) {
          store(reinterpret_cast<float*>(panel + (k + 2 * i) * 16), rows[i]);
        }
      }
    }
  }

  FOVEA_INLINE static void store_left(Bf16* dst, int64_t ld, int row, int col, Vec x) {
    store(dst + row * ld + col, x);
  }
  // Two neighbouring vectors at once, from a column that is a multiple of 32.
  FOVEA_INLINE static void store_left_two(Bf16* dst, int64_t ld, int row, int col, Vec x, Vec y) {
#ifdef __AVX512BF16__
    _mm512_storeu_si512(dst + row * ld + col, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(y, x)));
#else
    store_left(dst, ld, row, col, x);
    store_left(dst, ld, row, col + kLanes, y);
#endif
  }
  FOVEA_INLINE static void store_right(Bf16* dst, int64_t depth_pad, int row, int col,
                                       const Vec (&x)[4]) {
    Bf16* const p = dst + (col / 16) * depth_pad * 16 + row * 16;
    _mm512_storeu_si512(p, paired(x[0], x[1]));
    _mm512_storeu_si512(p + 32, paired(x[2], x[3]));
  }

  FOVEA_INLINE static float right_at(const Bf16* src, int64_t depth_pad, int row, int col) {
    return to_float(src[(col / 16) * depth_pad * 16 + row / 2 * 32 + col % 16 * 2 + row % 2]);
  }

 private:
  struct Interleaved {
    __m512i low, high;  // columns 0..15, 16..31
  };

  // The first n of 32 elements as they lie, zeros after them.
  FOVEA_INLINE static __m512i raw(const Bf16* p, int n) {
    if (n >= 32) return _mm512_loadu_si512(p);
    return _mm512_maskz_loadu_epi16(n > 0 ? (1u << n) - 1u : 0u, p);
  }

  // Those of 32 elements that are NaN or Inf: all bits of the exponent are set.
  FOVEA_INLINE static __mmask32 nonfinite(__m512i x) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    return _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent);
  }

  FOVEA_INLINE static Interleaved interleave(__m512i x, __m512i y) {
    const auto widen_low = [](__m512i v) {
      return _mm512_cvtepu16_epi32(_mm512_castsi512_si256(v));
    };
    const auto widen_high = [](__m512i v) {
      return _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(v, 1));
    };
    return {_mm512_or_si512(widen_low(x), _mm512_slli_epi32(widen_low(y), 16)),
            _mm512_or_si512(widen_high(x), _mm512_slli_epi32(widen_high(y), 16))};
  }

  // bf16(x) in the low half of each dword, bf16(y) in the high half.
  FOVEA_INLINE static __m512i paired(Vec x, Vec y) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(narrow_bf16(x)),
                           _mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow_bf16(y)), 16));
  }
};

}  // namespace fovea::FOVEA_ISA
