// Stores to global memory.
#pragma once

#include <vector_types.h>

namespace fovea::ptx {

// 16 bytes, to an address that is a multiple of 16.
__device__ __forceinline__ void store_16(void* to, uint4 x) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w)
               : "memory");
}

}  // namespace fovea::ptx
