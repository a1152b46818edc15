// Loads from global memory that another kernel wrote.
#pragma once

#include <cstdint>

namespace fovea::ptx {

__device__ __forceinline__ void load_8(uint32_t& x, uint32_t& y, uint64_t from) {
  asm volatile("ld.global.nc.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "l"(from));
}

}  // namespace fovea::ptx
