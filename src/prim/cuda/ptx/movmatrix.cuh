// Transposing 8 x 8 matrices of 16-bit values that a warp's registers hold, and storing four.
#pragma once

#include <cstdint>

namespace fovea::ptx {

__device__ __forceinline__ uint32_t transpose_8x8(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// As ldmatrix_x4 reads: lane l names row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
#endif

}  // namespace fovea::ptx
