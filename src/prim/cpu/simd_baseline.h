// Vectors of 4 floats in plain C++ with the compiler's vector types: runs on any CPU.
#pragma once

#include <bit>

#include "base/half.h"
#include "prim/cpu/isa_namespace.h"

namespace fovea::FOVEA_ISA {

constexpr int kLanes = 4;
constexpr int kVectorRegisters = 16;
constexpr bool kFmaTakesALane = false;
using Vec = float __attribute__((vector_size(16)));
using IntVec = int32_t __attribute__((vector_size(16)));

FOVEA_INLINE Vec zero() { return Vec{}; }
FOVEA_INLINE Vec broadcast(float x) { return Vec{x, x, x, x}; }
FOVEA_INLINE Vec iota() { return Vec{0, 1, 2, 3}; }

FOVEA_INLINE Vec load(const float* p) {
  Vec x;
  __builtin_memcpy(&x, p, sizeof(x));
  return x;
}
template <typename T>
FOVEA_INLINE Vec load(const T* p) {
  return Vec{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
}

// The first n < kLanes elements, zeros after them; reads nothing beyond.
template <typename T>
FOVEA_INLINE Vec load_first(const T* p, int n) {
  Vec x{};
  for (int i = 0; i < kLanes; ++i) {
    if (i < n) x[i] = to_float(p[i]);
  }
  return x;
}

FOVEA_INLINE void store_one(float* p, float x) { *p = x; }
FOVEA_INLINE void store_one(Bf16* p, float x) { *p = to_bf16(x); }
FOVEA_INLINE void store_one(F16* p, float x) { *p = to_f16(x); }

FOVEA_INLINE void store(float* p, Vec x) { __builtin_memcpy(p, &x, sizeof(x)); }
template <typename T>
FOVEA_INLINE void store(T* p, Vec x) {
  for (int i = 0; i < kLanes; ++i) store_one(p + i, x[i]);
}
template <typename T>
FOVEA_INLINE void store_first(T* p, Vec x, int n) {
  for (int i = 0; i < kLanes; ++i) {
    if (i < n) store_one(p + i, x[i]);
  }
}

FOVEA_INLINE Vec bits_to_float(IntVec x) { return std::bit_cast<Vec>(x); }
FOVEA_INLINE IntVec float_to_bits(Vec x) { return std::bit_cast<IntVec>(x); }

FOVEA_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
FOVEA_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
FOVEA_INLINE Vec min(Vec a, Vec b) { return a < b ? a : b; }
FOVEA_INLINE Vec abs(Vec a) { return bits_to_float(float_to_bits(a) & 0x7fffffff); }
FOVEA_INLINE float sum(Vec a) { return (a[0] + a[2]) + (a[1] + a[3]); }
FOVEA_INLINE float largest(Vec a) {
  const float x = a[0] > a[1] ? a[0] : a[1], y = a[2] > a[3] ? a[2] : a[3];
  return x > y ? x : y;
}

// x where a and b differ (NaN differs from all), 0 where they are equal, even if x is NaN there.
FOVEA_INLINE Vec where_differ(Vec a, Vec b, Vec x) {
  return bits_to_float((a != b) & float_to_bits(x));
}
FOVEA_INLINE bool any_nonfinite(Vec x) {
  const IntVec finite = x - x == zero();
  return (finite[0] & finite[1] & finite[2] & finite[3]) == 0;
}

FOVEA_INLINE Vec where_less(Vec a, Vec b, Vec yes, Vec no) { return a < b ? yes : no; }
FOVEA_INLINE Vec copy_sign(Vec magnitude, Vec sign) {
  const IntVec bit = IntVec{} + static_cast<int32_t>(0x80000000u);
  return bits_to_float((float_to_bits(sign) & bit) | (float_to_bits(magnitude) & ~bit));
}

// Where the exponent field below can say 2^n: it says 0 for n = -127, infinity for n = 128. NaN
// fails both comparisons and stays.
FOVEA_INLINE Vec bounded_exponent(Vec x) {
  const Vec least = broadcast(-127.0f), most = broadcast(128.0f);
  x = x < least ? least : x;
  return x > most ? most : x;
}
// floor(x) of a bounded exponent; 0 of NaN, which has no integer.
FOVEA_INLINE IntVec floor_to_int(Vec x) {
  const IntVec toward_zero = __builtin_convertvector(x == x ? x : zero(), IntVec);
  return toward_zero + (__builtin_convertvector(toward_zero, Vec) > x);  // true is -1
}
// x = n + f with n = floor(x): gives f, and p * 2^n for the polynomial's value.
constexpr bool kFractionIsCentred = false;
FOVEA_INLINE Vec fraction(Vec x) { return x - __builtin_convertvector(floor_to_int(x), Vec); }
FOVEA_INLINE Vec scale_by_exponent(Vec p, Vec x) {
  const IntVec exponent = floor_to_int(x) + 127;
  using Unsigned = uint32_t __attribute__((vector_size(16)));
  return p * std::bit_cast<Vec>(std::bit_cast<Unsigned>(exponent) << 23);
}

FOVEA_INLINE void transpose_lanes(Vec (&r)[kLanes]) {
  const Vec low01 = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5);
  const Vec high01 = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
  const Vec low23 = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5);
  const Vec high23 = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
  r[0] = __builtin_shufflevector(low01, low23, 0, 1, 4, 5);
  r[1] = __builtin_shufflevector(low01, low23, 2, 3, 6, 7);
  r[2] = __builtin_shufflevector(high01, high23, 0, 1, 4, 5);
  r[3] = __builtin_shufflevector(high01, high23, 2, 3, 6, 7);
}

}  // namespace fovea::FOVEA_ISA
