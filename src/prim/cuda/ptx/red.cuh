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
  asm volatile(
      "red.global.add.f32 [%0], %1;\n"
      "red.global.add.f32 [%0+4], %2;\n"
      "red.global.add.f32 [%0+8], %3;\n"
      "red.global.add.f32 [%0+12], %4;" ::"l"(to),
      "f"(x), "f"(y), "f"(z), "f"(w)
      : "memory");
#endif
}

}  // namespace fovea::ptx
