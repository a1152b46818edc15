// The arithmetics that the attention formula is written over: exact (float64, the oracle) and plain
// (what an unfused framework does: every intermediate tensor rounded to the problem's dtype, sums
// in float32; with tf32, whatever a matrix product takes rounded to it). And elements of any dtype
// as such numbers.
#pragma once

#include <cstdint>

#include "base/half.h"
#include "fovea/tensor.h"

namespace fovea::reference {

// round: an element of a tensor that is written. factor: one that a matrix product takes.
struct Exact {
  using Real = double;
  static Real round(Real x) { return x; }
  static Real factor(Real x) { return x; }
};

struct PlainF32 {
  using Real = float;
  static Real round(Real x) { return x; }
  static Real factor(Real x) { return x; }
};

struct PlainTf32 {
  using Real = float;
  static Real round(Real x) { return x; }
  static Real factor(Real x) { return round_to_tf32(x); }
};

struct PlainBf16 {
  using Real = float;
  static Real round(Real x) { return to_float(to_bf16(x)); }
  static Real factor(Real x) { return x; }
};

struct PlainF16 {
  using Real = float;
  static Real round(Real x) { return to_float(to_f16(x)); }
  static Real factor(Real x) { return x; }
};

// count elements with stride 1 from element `at` on, widened (or, f64 to float, narrowed) to Real.
template <typename Real>
void load(const TensorView& t, int64_t at, int64_t count, Real* out) {
  const auto copy = [&](const auto* from) {
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<Real>(to_float(from[i]));
  };
  switch (t.dtype) {
    case DType::kF32: return copy(static_cast<const float*>(t.data) + at);
    case DType::kBf16: return copy(static_cast<const Bf16*>(t.data) + at);
    case DType::kF16: return copy(static_cast<const F16*>(t.data) + at);
    case DType::kF64: {
      const double* from = static_cast<const double*>(t.data) + at;
      for (int64_t i = 0; i < count; ++i) out[i] = static_cast<Real>(from[i]);
      return;
    }
    case DType::kBool:
    case DType::kI32: return;  // api/ lets neither hold numbers
  }
}

template <typename Real>
Real load_one(const TensorView& t, int64_t at) {
  Real x = 0;
  load(t, at, 1, &x);
  return x;
}

// count elements with stride 1, rounded to the tensor's dtype.
template <typename Real>
void store(const TensorView& t, int64_t at, int64_t count, const Real* from) {
  const auto copy = [&](auto* to, auto&& convert) {
    for (int64_t i = 0; i < count; ++i) to[i] = convert(from[i]);
  };
  const auto narrow = [](Real x) { return static_cast<float>(x); };
  switch (t.dtype) {
    case DType::kF32: return copy(static_cast<float*>(t.data) + at, narrow);
    case DType::kF64:
      return copy(static_cast<double*>(t.data) + at, [](Real x) { return static_cast<double>(x); });
    case DType::kBf16:
      return copy(static_cast<Bf16*>(t.data) + at, [&](Real x) { return to_bf16(narrow(x)); });
    case DType::kF16:
      return copy(static_cast<F16*>(t.data) + at, [&](Real x) { return to_f16(narrow(x)); });
    case DType::kBool:
    case DType::kI32: return;
  }
}

}  // namespace fovea::reference
