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

namespace fovea::FOVEA_ISA {

// a * b + sum, of long rows of such products whose sums keep their registers. Left to itself GCC
// has some end in an operand's register, and moves vectors about, and to memory, to make room.
FOVEA_INLINE Vec fma_in_place(Vec a, Vec b, Vec sum) {
#if defined(__FMA__)
  asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
#else
  return fma(a, b, sum);
#endif
}

// sum + b times the number at p: one operation less to fetch than a broadcast and a product, one
// load more than a broadcast that several products share.
FOVEA_INLINE Vec fma_of_number(const float* p, Vec b, Vec sum) {
#if defined(__AVX512F__)
  asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(b), "m"(*p));
  return sum;
#else
  return fma_in_place(broadcast(*p), b, sum);
#endif
}

#ifndef FOVEA_ISA_NEON

// A number that many fma() add.
struct Addend {
  constexpr explicit Addend(float x) : value(x) {}
  FOVEA_INLINE operator Vec() const { return broadcast(value); }

  float value;
};
#endif

}  // namespace fovea::FOVEA_ISA
