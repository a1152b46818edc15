// Loads and stores of the layers' element types, and the type they are computed in.
#pragma once

#include "base/half.h"
#include "prim/cpu/isa_namespace.h"

namespace fovea::FOVEA_ISA {

template <typename T>
struct Element {
  using Real = float;
  FOVEA_INLINE static float load(T x) { return to_float(x); }
};
template <>
struct Element<double> {
  using Real = double;
  FOVEA_INLINE static double load(double x) { return x; }
};
template <typename T>
using Real = typename Element<T>::Real;

template <typename T>
FOVEA_INLINE Real<T> value_of(T x) {
  return Element<T>::load(x);
}

// Builtins, because std's are functions that the linker may merge with those of other files.
FOVEA_INLINE double root(double x) { return __builtin_sqrt(x); }
FOVEA_INLINE float root(float x) { return __builtin_sqrtf(x); }

// A sum over rows, which is kept as a double but made in S.
template <typename S>
FOVEA_INLINE void add_in(double* sum, S x) {
  *sum = static_cast<double>(static_cast<S>(*sum) + x);
}

FOVEA_INLINE void put(double* p, double x) { *p = x; }
FOVEA_INLINE void put(float* p, float x) { *p = x; }
FOVEA_INLINE void put(Bf16* p, float x) { *p = to_bf16(x); }
FOVEA_INLINE void put(F16* p, float x) { *p = to_f16(x); }

}  // namespace fovea::FOVEA_ISA
