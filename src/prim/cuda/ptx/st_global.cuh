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

// Where `there` is true; without a branch, of which a compiler has more work than of the store.
__device__ __forceinline__ void store_16_if(bool there, void* to, uint4 x) {
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      "setp.ne.u32 there, %0, 0;\n"
      "@there st.global.v4.b32 [%1], {%2, %3, %4, %5};\n"
      "}" ::"r"(static_cast<uint32_t>(there)),
      "l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
      : "memory");
}
__device__ __forceinline__ void store_if(bool there, float* to, float x) {
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      "setp.ne.u32 there, %0, 0;\n"
      "@there st.global.f32 [%1], %2;\n"
      "}" ::"r"(static_cast<uint32_t>(there)),
      "l"(to), "f"(x)
      : "memory");
}

}  // namespace fovea::ptx
