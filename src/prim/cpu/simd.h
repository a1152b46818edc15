// The vector type of the instruction set this file is compiled for.
#pragma once

#include "prim/cpu/isa_namespace.h"

#if defined(__AVX512F__)
#include "prim/cpu/simd_avx512.h"
#elif defined(__AVX2__)
#include "prim/cpu/simd_avx2.h"
#elif defined(FOVEA_ISA_NEON)
#include "prim/cpu/simd_neon.h"
#else
#include "prim/cpu/simd_baseline.h"
#endif

#ifndef FOVEA_ISA_NEON
namespace fovea::FOVEA_ISA {

// A number that many fma() add.
struct Addend {
  constexpr explicit Addend(float x) : value(x) {}
  FOVEA_INLINE operator Vec() const { return broadcast(value); }

  float value;
};

}  // namespace fovea::FOVEA_ISA
#endif
