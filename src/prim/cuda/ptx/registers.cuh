// Registers that a warpgroup gives back or takes, and values that must be where the source says.
#pragma once

#include <cstdint>

namespace fovea::ptx {

template <int kCount>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// The compiler may not move what computes or reads these values across this line.
__device__ __forceinline__ void pin(float& x) { asm volatile("" : "+f"(x)::"memory"); }
template <int kCount>
__device__ __forceinline__ void pin(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) pin(x[i]);
}

// The same value, of which the compiler does not know so: what is computed from it is computed here
// and not kept in registers since earlier.
template <typename T>
__device__ __forceinline__ T renewed(T x) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  if constexpr (sizeof(T) == 4) {
    asm volatile("" : "+r"(x));
  } else {
    asm volatile("" : "+l"(x));
  }
  return x;
}

}  // namespace fovea::ptx
