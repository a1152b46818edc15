// Loads from global memory that another kernel wrote.
#pragma once

#include <cstdint>

namespace fovea::ptx {

__device__ __forceinline__ void load_4(uint32_t& x, uint64_t from) {
  asm volatile("ld.global.nc.L2::128B.u32 %0, [%1];" : "=r"(x) : "l"(from));
}

__device__ __forceinline__ void load_8(uint32_t& x, uint32_t& y, uint64_t from) {
  asm volatile("ld.global.nc.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "l"(from));
}

// Has the line that holds `from` brought to the L2 cache.
__device__ __forceinline__ void prefetch_line(uint64_t from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

}  // namespace fovea::ptx
