// Stores to global memory.
#pragma once

#include <vector_types.h>

#include <cstdint>

namespace fovea::ptx {

// 8 bytes, to an address that is a multiple of 8.
__device__ __forceinline__ void store_8(uint64_t to, uint32_t x, uint32_t y) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(x), "r"(y) : "memory");
}

// 16 bytes, to an address that is a multiple of 16.
__device__ __forceinline__ void store_16(void* to, uint4 x) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w)
               : "memory");
}

}  // namespace fovea::ptx
