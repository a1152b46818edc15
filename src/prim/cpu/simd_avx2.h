// Vectors of 8 floats in AVX2 registers, with FMA and F16C.
#pragma once

#include <immintrin.h>

#include "base/half.h"
#include "prim/cpu/first_words.h"
#include "prim/cpu/isa_namespace.h"

namespace fovea::FOVEA_ISA {

constexpr int kLanes = 8;
constexpr int kVectorRegisters = 16;
constexpr bool kFmaTakesALane = false;
using Vec = __m256;

FOVEA_INLINE Vec zero() { return _mm256_setzero_ps(); }
FOVEA_INLINE Vec broadcast(float x) { return _mm256_set1_ps(x); }
FOVEA_INLINE Vec iota() { return _mm256_set_ps(7, 6, 5, 4, 3, 2, 1, 0); }

FOVEA_INLINE Vec widen(__m128i bf16) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bf16), 16));
}

// All ones in the first n lanes.
FOVEA_INLINE __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0));
}

FOVEA_INLINE __m128i load_words(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
FOVEA_INLINE __m128i load_first_words(const void* p, int n) {
  const Words8 words = first_8_words(p, n);
  return _mm_set_epi64x(static_cast<int64_t>(words.high), static_cast<int64_t>(words.low));
}
FOVEA_INLINE void store_words(void* p, __m128i x) { _mm_storeu_si128(static_cast<__m128i*>(p), x); }
FOVEA_INLINE void store_first_words(void* p, __m128i x, int n) {
  store_first_8_words(
      p,
      {static_cast<uint64_t>(_mm_cvtsi128_si64(x)), static_cast<uint64_t>(_mm_extract_epi64(x, 1))},
      n);
}

FOVEA_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
FOVEA_INLINE Vec load(const Bf16* p) { return widen(load_words(p)); }
FOVEA_INLINE Vec load(const F16* p) { return _mm256_cvtph_ps(load_words(p)); }

// The first n < kLanes elements, zeros after them; reads nothing beyond.
FOVEA_INLINE Vec load_first(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
FOVEA_INLINE Vec load_first(const Bf16* p, int n) { return widen(load_first_words(p, n)); }
FOVEA_INLINE Vec load_first(const F16* p, int n) { return _mm256_cvtph_ps(load_first_words(p, n)); }

// bf16 with round to nearest even, NaN kept.
FOVEA_INLINE __m128i narrow_bf16(Vec x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 kept = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet),
                                       _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(kept), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}
FOVEA_INLINE __m128i narrow_f16(Vec x) {
  return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

FOVEA_INLINE void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
FOVEA_INLINE void store(Bf16* p, Vec x) { store_words(p, narrow_bf16(x)); }
FOVEA_INLINE void store(F16* p, Vec x) { store_words(p, narrow_f16(x)); }
FOVEA_INLINE void store_first(float* p, Vec x, int n) { _mm256_maskstore_ps(p, first_lanes(n), x); }
FOVEA_INLINE void store_first(Bf16* p, Vec x, int n) { store_first_words(p, narrow_bf16(x), n); }
FOVEA_INLINE void store_first(F16* p, Vec x, int n) { store_first_words(p, narrow_f16(x), n); }

FOVEA_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
FOVEA_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
FOVEA_INLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
FOVEA_INLINE Vec abs(Vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
FOVEA_INLINE float sum(Vec a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
FOVEA_INLINE float largest(Vec a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

// x where a and b differ (NaN differs from all), 0 where they are equal, even if x is NaN there.
FOVEA_INLINE Vec where_differ(Vec a, Vec b, Vec x) {
  return _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_NEQ_UQ), x);
}
FOVEA_INLINE bool any_nonfinite(Vec x) {
  const Vec nan_if_not = _mm256_sub_ps(x, x);
  return _mm256_movemask_ps(_mm256_cmp_ps(nan_if_not, nan_if_not, _CMP_UNORD_Q)) != 0;
}

FOVEA_INLINE Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
  return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
FOVEA_INLINE Vec copy_sign(Vec magnitude, Vec sign) {
  const Vec bit = _mm256_set1_ps(-0.0f);
  return _mm256_or_ps(_mm256_and_ps(bit, sign), _mm256_andnot_ps(bit, magnitude));
}

// Where the exponent field below can say 2^n: it says 0 for n = -127, infinity for n = 128. The
// second operand of MAXPS and MINPS is the one that a NaN comes out of.
FOVEA_INLINE Vec bounded_exponent(Vec x) {
  return _mm256_min_ps(_mm256_set1_ps(128.0f), _mm256_max_ps(_mm256_set1_ps(-127.0f), x));
}
// x = n + f with n = floor(x): gives f, and p * 2^n for the polynomial's value.
constexpr bool kFractionIsCentred = false;
FOVEA_INLINE Vec fraction(Vec x) { return _mm256_sub_ps(x, _mm256_floor_ps(x)); }
FOVEA_INLINE Vec scale_by_exponent(Vec p, Vec x) {
  const __m256i n = _mm256_cvtps_epi32(_mm256_floor_ps(x));
  const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(p, _mm256_castsi256_ps(bits));
}

FOVEA_INLINE void transpose_lanes(Vec (&r)[kLanes]) {
  Vec t[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {  // now 4 x 4 transposes inside each half
    const auto pair = [&](int k) { return _mm256_castps_pd(t[4 * i + k]); };
    r[4 * i] = _mm256_castpd_ps(_mm256_unpacklo_pd(pair(0), pair(2)));
    r[4 * i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(pair(0), pair(2)));
    r[4 * i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(pair(1), pair(3)));
    r[4 * i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(pair(1), pair(3)));
  }
  for (int i = 0; i < 4; ++i) {
    const Vec low = r[i], high = r[4 + i];
    r[i] = _mm256_permute2f128_ps(low, high, 0x20);
    r[4 + i] = _mm256_permute2f128_ps(low, high, 0x31);
  }
}

}  // namespace fovea::FOVEA_ISA
