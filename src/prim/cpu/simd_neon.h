// Vectors of 4 floats in AArch64 NEON registers.
#pragma once

#include <arm_neon.h>

#include <type_traits>

#include "base/half.h"
#include "prim/cpu/first_words.h"
#include "prim/cpu/isa_namespace.h"

namespace fovea::FOVEA_ISA {

constexpr int kLanes = 4;
constexpr int kVectorRegisters = 32;
// FMLA takes one lane of a register for all; loading one number into all lanes takes the time of an
// FMLA.
constexpr bool kFmaTakesALane = true;
using Vec = float32x4_t;

FOVEA_INLINE Vec zero() { return vdupq_n_f32(0); }
FOVEA_INLINE Vec broadcast(float x) { return vdupq_n_f32(x); }
FOVEA_INLINE Vec iota() { return Vec{0, 1, 2, 3}; }

FOVEA_INLINE Vec widen(uint16x4_t bf16) { return vreinterpretq_f32_u32(vshll_n_u16(bf16, 16)); }
FOVEA_INLINE Vec widen_f16(uint16x4_t f16) { return vcvt_f32_f16(vreinterpret_f16_u16(f16)); }

FOVEA_INLINE uint16x4_t load_words(const void* p) {
  return vld1_u16(static_cast<const uint16_t*>(p));
}
FOVEA_INLINE uint16x4_t load_first_words(const void* p, int n) {
  return vcreate_u16(first_4_words(p, n));
}

FOVEA_INLINE Vec load(const float* p) { return vld1q_f32(p); }
FOVEA_INLINE Vec load(const Bf16* p) { return widen(load_words(p)); }
FOVEA_INLINE Vec load(const F16* p) { return widen_f16(load_words(p)); }

// The first n < kLanes elements, zeros after them; reads nothing beyond.
FOVEA_INLINE Vec load_first(const float* p, int n) {
  Vec x = zero();
  if (n > 0) x = vld1q_lane_f32(p, x, 0);
  if (n > 1) x = vld1q_lane_f32(p + 1, x, 1);
  if (n > 2) x = vld1q_lane_f32(p + 2, x, 2);
  return x;
}
FOVEA_INLINE Vec load_first(const Bf16* p, int n) { return widen(load_first_words(p, n)); }
FOVEA_INLINE Vec load_first(const F16* p, int n) { return widen_f16(load_first_words(p, n)); }

// bf16 with round to nearest even, NaN kept.
FOVEA_INLINE uint16x4_t narrow_bf16(Vec x) {
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
  return vreinterpret_u16_bf16(vcvt_bf16_f32(x));
#else
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16);
#endif
}
FOVEA_INLINE uint16x4_t narrow_f16(Vec x) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }

FOVEA_INLINE void store_words(void* p, uint16x4_t x) { vst1_u16(static_cast<uint16_t*>(p), x); }
FOVEA_INLINE void store_first_words(void* p, uint16x4_t x, int n) {
  store_first_4_words(p, vget_lane_u64(vreinterpret_u64_u16(x), 0), n);
}

FOVEA_INLINE void store(float* p, Vec x) { vst1q_f32(p, x); }
FOVEA_INLINE void store(Bf16* p, Vec x) { store_words(p, narrow_bf16(x)); }
FOVEA_INLINE void store(F16* p, Vec x) { store_words(p, narrow_f16(x)); }
FOVEA_INLINE void store_first(float* p, Vec x, int n) {
  if (n > 0) vst1q_lane_f32(p, x, 0);
  if (n > 1) vst1q_lane_f32(p + 1, x, 1);
  if (n > 2) vst1q_lane_f32(p + 2, x, 2);
}
FOVEA_INLINE void store_first(Bf16* p, Vec x, int n) { store_first_words(p, narrow_bf16(x), n); }
FOVEA_INLINE void store_first(F16* p, Vec x, int n) { store_first_words(p, narrow_f16(x), n); }

FOVEA_INLINE Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
// A number that many fma() add. FMLA adds to the register that holds it, so there it must be anew
// each time: copied from another, as the compiler would, which takes the time of an FMLA, or
// loaded, which takes no vector unit's.
struct Addend {
  constexpr explicit Addend(float x) {
    if (std::is_constant_evaluated()) {
      for (float& lane : lanes) lane = x;
    } else {
      store(lanes, broadcast(x));  // whole: a load would have to wait for parts
    }
  }
  FOVEA_INLINE operator Vec() const { return load(lanes); }

  alignas(Vec) float lanes[kLanes];
};
FOVEA_INLINE Vec fma(Vec a, Vec b, const Addend& c) {
  Vec sum;
  asm("ldr %q0, %3\n\tfmla %0.4s, %1.4s, %2.4s" : "=&w"(sum) : "w"(a), "w"(b), "m"(c.lanes));
  return sum;
}

// Of a number and NaN the number, so that one bad score does not unsettle the base of the others.
FOVEA_INLINE Vec max(Vec a, Vec b) { return vmaxnmq_f32(a, b); }
FOVEA_INLINE Vec min(Vec a, Vec b) { return vminnmq_f32(a, b); }
FOVEA_INLINE Vec abs(Vec a) { return vabsq_f32(a); }
FOVEA_INLINE float sum(Vec a) { return vaddvq_f32(a); }
FOVEA_INLINE float largest(Vec a) { return vmaxnmvq_f32(a); }

// x where a and b differ (NaN differs from all), 0 where they are equal, even if x is NaN there.
FOVEA_INLINE Vec where_differ(Vec a, Vec b, Vec x) {
  return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x), vceqq_f32(a, b)));
}
FOVEA_INLINE bool any_nonfinite(Vec x) {
  return vminvq_u32(vceqq_f32(vsubq_f32(x, x), zero())) == 0;
}

FOVEA_INLINE Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
  return vbslq_f32(vcltq_f32(a, b), yes, no);
}
FOVEA_INLINE Vec copy_sign(Vec magnitude, Vec sign) {
  return vbslq_f32(vdupq_n_u32(0x80000000u), sign, magnitude);
}

// Where the exponent field below can say 2^n: it says 0 for n = -127. FMAX keeps NaN.
FOVEA_INLINE Vec bounded_exponent(Vec x) { return vmaxq_f32(x, vdupq_n_f32(-127.0f)); }
// x = n + f with n the integer nearest to x: gives f, and p * 2^n for the polynomial's value. n is
// what stands in the lowest bits of x + kToInteger, which ends where floats are integers; above n
// stands the bias of a float's exponent. FRINT and FCVT would take half of a vector unit's time.
constexpr bool kFractionIsCentred = true;
constexpr float kToInteger = 0x1.8p23f + 127;
FOVEA_INLINE Vec fraction(Vec x) {
  const Vec to_integer = broadcast(kToInteger);
  return vsubq_f32(x, vsubq_f32(vaddq_f32(x, to_integer), to_integer));
}
FOVEA_INLINE Vec scale_by_exponent(Vec p, Vec x) {
  const Vec n = vaddq_f32(x, broadcast(kToInteger));
  return vmulq_f32(p, vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(n), 23)));
}

FOVEA_INLINE void transpose_lanes(Vec (&r)[kLanes]) {
  const auto pairs = [](Vec x) { return vreinterpretq_f64_f32(x); };
  const auto lanes = [](float64x2_t x) { return vreinterpretq_f32_f64(x); };
  const Vec even01 = vtrn1q_f32(r[0], r[1]), odd01 = vtrn2q_f32(r[0], r[1]);
  const Vec even23 = vtrn1q_f32(r[2], r[3]), odd23 = vtrn2q_f32(r[2], r[3]);
  r[0] = lanes(vtrn1q_f64(pairs(even01), pairs(even23)));
  r[1] = lanes(vtrn1q_f64(pairs(odd01), pairs(odd23)));
  r[2] = lanes(vtrn2q_f64(pairs(even01), pairs(even23)));
  r[3] = lanes(vtrn2q_f64(pairs(odd01), pairs(odd23)));
}

}  // namespace fovea::FOVEA_ISA
