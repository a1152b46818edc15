// Functions over the vectors of one instruction set that need nothing but its arithmetic.
#pragma once

#include <array>
#include <utility>

#include "prim/cpu/simd.h"

namespace fovea::FOVEA_ISA {

// How exact 2^x must be. Weights that are rounded to bf16 next would do with its 2^-9, but their
// f32 sums would not: lse is theirs.
enum class Exp2 { kF32, kBf16 };

// Polynomials for 2^f, from the highest power down to the constant term, which is one: minimax
// fits over [0, 1], or [-1/2, 1/2] where that is what fraction() gives. Their largest relative
// errors are 1e-7, less than the rounding of scores before it, and 3.6e-6. They agree with
// themselves at the two ends, so that scores all alike, which may come as f near either, get
// weights all alike.
template <Exp2 kExact>
constexpr auto kExp2Powers = [] {
  const auto addends = [](auto... x) { return std::array{Addend(x)..., Addend(1.0f)}; };
  if constexpr (kExact == Exp2::kF32) {
    return kFractionIsCentred ? addends(1.326472714e-3f, 9.671512640e-3f, 5.550733743e-2f,
                                        2.402224209e-1f, 6.931469776e-1f)
                              : addends(1.879318648e-3f, 8.990995103e-3f, 5.581867595e-2f,
                                        2.401592715e-1f, 6.931517388e-1f);
  } else {
    return kFractionIsCentred
               ? addends(9.661083707e-3f, 5.596266186e-2f, 2.402297796e-1f, 6.931168430e-1f)
               : addends(1.355574723e-2f, 5.203236901e-2f, 2.413797629e-1f, 6.930321208e-1f);
  }
}();

// f(0) .. f(kCount - 1), with no loop left: arrays that a loop or an asm stands beside may
// otherwise stay in memory.
template <int kCount, typename F>
FOVEA_INLINE void each(const F& f) {
  [&]<int... i>(std::integer_sequence<int, i...>) FOVEA_INLINED { (f(i), ...); }
  (std::make_integer_sequence<int, kCount>());
}

// 2^x of each x < 127, with 2^0 = 1 exactly, 2^-inf = 0, NaN kept. Step by step through all of
// them: a CPU that looks few instructions ahead waits for one chain of dependent ones, not for
// several.
template <Exp2 kExact, int kCount>
FOVEA_INLINE void exp2(Vec (&x)[kCount]) {
  constexpr auto& powers = kExp2Powers<kExact>;
  Vec f[kCount], p[kCount];
  each<kCount>([&](int i) FOVEA_INLINED { x[i] = bounded_exponent(x[i]); });
  each<kCount>([&](int i) FOVEA_INLINED { f[i] = fraction(x[i]); });
  each<kCount>([&](int i) FOVEA_INLINED { p[i] = fma(powers[0], f[i], powers[1]); });
  each<powers.size() - 2>([&](size_t power) FOVEA_INLINED {
    each<kCount>([&](int i) FOVEA_INLINED { p[i] = fma(p[i], f[i], powers[power + 2]); });
  });
  each<kCount>([&](int i) FOVEA_INLINED { x[i] = scale_by_exponent(p[i], x[i]); });
}
template <Exp2 kExact>
FOVEA_INLINE Vec exp2(Vec x) {
  Vec one[1] = {x};
  exp2<kExact>(one);
  return one[0];
}

// log2 of positive, normal floats, to 1e-7; NaN for NaN and Inf. x = 2^e (1 + t) with 1 + t in
// [1/sqrt 2, sqrt 2], and a minimax fit of log2(1 + t) / t.
FOVEA_INLINE Vec log2(Vec x) {
  using Ints = int32_t __attribute__((vector_size(sizeof(Vec))));
  using Words = uint32_t __attribute__((vector_size(sizeof(Vec))));
  const Words bits = reinterpret_cast<Words>(x);
  const Ints exponent = reinterpret_cast<Ints>(bits - 0x3f3504f3u) >> 23;
  const Words mantissa = bits - (reinterpret_cast<Words>(exponent) << 23);
  const Vec t = reinterpret_cast<Vec>(mantissa) - broadcast(1.0f);
  Vec p = broadcast(-1.457444578e-1f);
  p = fma(p, t, broadcast(2.368903607e-1f));
  p = fma(p, t, broadcast(-2.500690520e-1f));
  p = fma(p, t, broadcast(2.867074609e-1f));
  p = fma(p, t, broadcast(-3.600872159e-1f));
  p = fma(p, t, broadcast(4.809394479e-1f));
  p = fma(p, t, broadcast(-7.213571668e-1f));
  p = fma(p, t, broadcast(1.442694783f));
  return fma(p, t, __builtin_convertvector(exponent, Vec)) + (x - x);
}

// tanh by (1 - e) / (1 + e), e = exp(-2|x|), and by an odd series near zero, where that would
// cancel.
FOVEA_INLINE Vec tanh(Vec x) {
  const Vec a = abs(x);
  const Vec one = broadcast(1.0f);
  const Vec e = exp2<Exp2::kF32>(a * broadcast(-2.885390082f));  // -2 log2(e)
  const Vec far = copy_sign((one - e) / (one + e), x);
  const Vec z = x * x;  // |x| < 0.25: the next term, 62/2835 z^4, is below 4e-7 of tanh
  Vec near = broadcast(2.186948854e-2f);
  near = fma(near, z, broadcast(-5.396825397e-2f));
  near = fma(near, z, broadcast(1.333333333e-1f));
  near = fma(near, z, broadcast(-3.333333333e-1f));
  near = fma(near, z, one) * x;
  return where_less(a, broadcast(0.25f), near, far);
}

// n elements from p, widened; zeros after them.
template <typename T>
FOVEA_INLINE Vec load_up_to(const T* p, int n) {
  return n >= kLanes ? load(p) : load_first(p, n);
}

template <typename T>
FOVEA_INLINE void store_up_to(T* p, Vec x, int n) {
  if (n >= kLanes) {
    store(p, x);
  } else {
    store_first(p, x, n);
  }
}

// Asks for n elements that are written soon. Rows of a head lie apart in memory, in runs too short
// for the hardware to foresee the next, and a store that waits for its line holds up those after
// it.
template <typename T>
FOVEA_INLINE void prefetch_to_write(T* p, int n) {
  constexpr int kLine = 64 / sizeof(T);
  for (int i = 0; i < n; i += kLine) __builtin_prefetch(p + i, 1, 3);
}

template <typename T>
FOVEA_INLINE void prefetch_to_read(const T* p, int n) {
  constexpr int kLine = 64 / sizeof(T);
  for (int i = 0; i < n; i += kLine) __builtin_prefetch(p + i, 0, 3);
}

// Two vectors from 2 * kLanes elements, in whatever order the instruction set loads fastest; the
// other two put vectors in element order into that order, and back. An instruction set may overload
// them.
template <typename T>
FOVEA_INLINE void load_two(const T* p, Vec& a, Vec& b) {
  a = load(p);
  b = load(p + kLanes);
}
template <typename T>
FOVEA_INLINE void to_loaded_order(const T*, Vec&, Vec&) {}
template <typename T>
FOVEA_INLINE void from_loaded_order(const T*, Vec&, Vec&) {}

// Whether rows x cols elements hold NaN or Inf.
template <typename T>
bool has_nonfinite(const T* src, int64_t stride, int rows, int cols) {
  constexpr int kRowsAhead = 8;
  Vec worst = zero(), worst2 = zero();  // 0 x is 0, or NaN when x is not finite
  for (int r = 0; r < rows; ++r) {
    const T* const row = src + r * stride;
    if (r + kRowsAhead < rows) prefetch_to_read(row + kRowsAhead * stride, cols);
    int d = 0;
    for (; d + 2 * kLanes <= cols; d += 2 * kLanes) {
      Vec a, b;
      load_two(row + d, a, b);
      worst = fma(a, zero(), worst);
      worst2 = fma(b, zero(), worst2);
    }
    for (; d < cols; d += kLanes) worst = fma(load_up_to(row + d, cols - d), zero(), worst);
  }
  return any_nonfinite(worst + worst2);
}

// Sums of kLanes vectors, one sum per lane.
FOVEA_INLINE Vec lane_sums(Vec (&r)[kLanes]) {
  transpose_lanes(r);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) r[i] = r[i] + r[i + half];
  }
  return r[0];
}

FOVEA_INLINE int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace fovea::FOVEA_ISA
