// Vectors of 16 floats in AVX-512 registers.
#pragma once

#include <immintrin.h>

#include "base/half.h"
#include "prim/cpu/isa_namespace.h"

namespace fovea::FOVEA_ISA {

constexpr int kLanes = 16;
constexpr int kVectorRegisters = 32;
constexpr bool kFmaTakesALane = false;
using Vec = __m512;

FOVEA_INLINE Vec zero() { return _mm512_setzero_ps(); }
FOVEA_INLINE Vec broadcast(float x) { return _mm512_set1_ps(x); }
FOVEA_INLINE Vec iota() {
  return _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
}

FOVEA_INLINE Vec widen(__m256i bf16) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16));
}

FOVEA_INLINE __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

FOVEA_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
FOVEA_INLINE Vec load(const Bf16* p) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
FOVEA_INLINE Vec load(const F16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// The first n < kLanes elements, zeros after them; reads nothing beyond.
FOVEA_INLINE Vec load_first(const float* p, int n) {
  return _mm512_maskz_loadu_ps(first_lanes(n), p);
}
FOVEA_INLINE Vec load_first(const Bf16* p, int n) {
  return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
FOVEA_INLINE Vec load_first(const F16* p, int n) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}

// 32 bf16 widen with one operation a vector into their even and their odd elements.
FOVEA_INLINE void load_two(const Bf16* p, Vec& even, Vec& odd) {
  const __m512i bits = _mm512_loadu_si512(p);
  even = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
  odd =
      _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
FOVEA_INLINE void to_loaded_order(const Bf16*, Vec& a, Vec& b) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const Vec low = a;
  a = _mm512_permutex2var_ps(low, even, b);
  b = _mm512_permutex2var_ps(low, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b);
}
FOVEA_INLINE void from_loaded_order(const Bf16*, Vec& a, Vec& b) {
  const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const Vec even = a;
  a = _mm512_permutex2var_ps(even, low, b);
  b = _mm512_permutex2var_ps(even, _mm512_add_epi32(low, _mm512_set1_epi32(8)), b);
}

// bf16 with round to nearest even, NaN kept: what VCVTNEPS2BF16 does, without needing it.
FOVEA_INLINE __m256i narrow_bf16(Vec x) {
#ifdef __AVX512BF16__
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x));
#else
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
#endif
}
FOVEA_INLINE __m256i narrow_f16(Vec x) {
  return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

FOVEA_INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
FOVEA_INLINE void store(Bf16* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(x));
}
FOVEA_INLINE void store(F16* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_f16(x));
}
FOVEA_INLINE void store_first(float* p, Vec x, int n) {
  _mm512_mask_storeu_ps(p, first_lanes(n), x);
}
FOVEA_INLINE void store_first(Bf16* p, Vec x, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_bf16(x));
}
FOVEA_INLINE void store_first(F16* p, Vec x, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_f16(x));
}

FOVEA_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
FOVEA_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
FOVEA_INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
FOVEA_INLINE Vec abs(Vec a) { return _mm512_abs_ps(a); }
FOVEA_INLINE float sum(Vec a) { return _mm512_reduce_add_ps(a); }
FOVEA_INLINE float largest(Vec a) { return _mm512_reduce_max_ps(a); }

// x where a and b differ (NaN differs from all), 0 where they are equal, even if x is NaN there.
FOVEA_INLINE Vec where_differ(Vec a, Vec b, Vec x) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ), x);
}
FOVEA_INLINE bool any_nonfinite(Vec x) {
  return _mm512_fpclass_ps_mask(x, 0x99) != 0;  // quiet NaN, +inf, -inf, signalling NaN
}

FOVEA_INLINE Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
FOVEA_INLINE Vec copy_sign(Vec magnitude, Vec sign) {
  const __m512i bit = _mm512_set1_epi32(static_cast<int>(0x80000000u));
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(bit, _mm512_castps_si512(sign),
                                                       _mm512_castps_si512(magnitude), 0xca));
}

// VREDUCE and VSCALEF take infinities as they come.
FOVEA_INLINE Vec bounded_exponent(Vec x) { return x; }
// x = n + f with n = floor(x): gives f, and p * 2^n for the polynomial's value.
constexpr bool kFractionIsCentred = false;
FOVEA_INLINE Vec fraction(Vec x) { return _mm512_reduce_ps(x, 0x01 | 0x08); }
FOVEA_INLINE Vec scale_by_exponent(Vec p, Vec x) { return _mm512_scalef_ps(p, x); }

FOVEA_INLINE void transpose_lanes(Vec (&r)[kLanes]) {
  __m512 t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    const auto lo = [&](int k) { return _mm512_castps_pd(t[4 * i + k]); };
    r[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(lo(0), lo(2)));
    r[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(lo(0), lo(2)));
    r[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(lo(1), lo(3)));
    r[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(lo(1), lo(3)));
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_f32x4(r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_f32x4(t[i], t[8 + i], 0x88);
    r[4 + i] = _mm512_shuffle_f32x4(t[4 + i], t[12 + i], 0x88);
    r[8 + i] = _mm512_shuffle_f32x4(t[i], t[8 + i], 0xdd);
    r[12 + i] = _mm512_shuffle_f32x4(t[4 + i], t[12 + i], 0xdd);
  }
}

}  // namespace fovea::FOVEA_ISA
