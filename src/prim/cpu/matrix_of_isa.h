// The matrix classes of one instruction set: MatrixF32, and MatrixBf16 for products of bf16.
#pragma once

#include "prim/cpu/matrix.h"
#include "prim/cpu/matrix_f32.h"
#if defined(__AMX_BF16__)
#include "prim/cpu/matrix_amx.h"
#elif defined(__AVX512BF16__)
#include "prim/cpu/matrix_vdpbf16.h"
#elif defined(FOVEA_ISA_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include "prim/cpu/matrix_bfmmla.h"
#endif

namespace fovea::FOVEA_ISA {

#if defined(__AMX_BF16__)
using MatrixBf16 = MatrixAmx;
#elif defined(__AVX512BF16__)
using MatrixBf16 = MatrixVdpbf16;
#elif defined(FOVEA_ISA_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
using MatrixBf16 = MatrixBfmmla;
#else
using MatrixBf16 = MatrixF32;
#endif
static_assert(Matrix<MatrixF32, float> && Matrix<MatrixF32, F16> && Matrix<MatrixBf16, Bf16>);

}  // namespace fovea::FOVEA_ISA
