// Counts in global memory by which blocks wait for each other.
#pragma once

namespace fovea::ptx {

// Waits until a count is `value`; the warp then sees what was written before it became so.
__device__ __forceinline__ void wait_for_warp(const int* count, int value) {
  if (threadIdx.x % 32 == 0) {
    int now;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(count) : "memory");
    } while (now != value);
  }
  __syncwarp();
}

// Counts one on, after all that the warp has written.
__device__ __forceinline__ void pass_for_warp(int* count) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(count) : "memory");
  }
}

}  // namespace fovea::ptx
