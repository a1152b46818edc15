// Loads from global memory that another kernel wrote.
#pragma once

#include <cstdint>

namespace fovea::ptx {

// 16 bytes that are not needed a second time.
__device__ __forceinline__ void load_once_16(uint32_t (&x)[4], uint64_t from) {
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "l"(from));
}

__device__ __forceinline__ void load_8(uint32_t& x, uint32_t& y, uint64_t from) {
  asm volatile("ld.global.nc.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "l"(from));
}

}  // namespace fovea::ptx
