// Floats in shared memory, one, two or four at a time, and 16 bytes of anything.
#pragma once

#include <cstdint>

namespace fovea::tile {

__device__ __forceinline__ float load_float(uint32_t shared) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(shared));
  return x;
}
__device__ __forceinline__ float2 load_float2(uint32_t shared) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(shared));
  return x;
}
__device__ __forceinline__ void store_float2(uint32_t shared, float2 x) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(shared), "f"(x.x), "f"(x.y) : "memory");
}
__device__ __forceinline__ float4 load_float4(uint32_t shared) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(shared));
  return x;
}
__device__ __forceinline__ void store_float4(uint32_t shared, float4 x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "f"(x.x), "f"(x.y),
               "f"(x.z), "f"(x.w)
               : "memory");
}

__device__ __forceinline__ uint4 load_16(uint32_t shared) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(shared));
  return x;
}

}  // namespace fovea::tile
