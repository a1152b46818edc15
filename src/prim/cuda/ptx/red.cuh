// red: additions to global memory that nobody waits for.
#pragma once

namespace fovea::ptx {

// Four neighbouring floats, each added atomically: one request since Hopper, four before.
__device__ __forceinline__ void red_add_4(float4* to, float x, float y, float z, float w) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z),
               "f"(w)
               : "memory");
#else
  const float values[4] = {x, y, z, w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(&to->x + i), "f"(values[i]) : "memory");
  }
#endif
}

}  // namespace fovea::ptx
