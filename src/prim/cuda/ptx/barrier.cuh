// Barriers among some of a block's warps.
#pragma once

namespace fovea::ptx {

// Waits until `threads` threads have come to barrier `id` (1 to 15).
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Comes to it without waiting.
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// As barrier_sync; whether any brought true.
__device__ __forceinline__ bool barrier_or(int id, int threads, bool mine) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred mine, any;\n"
      "setp.ne.s32 mine, %3, 0;\n"
      "barrier.cta.red.or.pred any, %1, %2, mine;\n"
      "selp.s32 %0, 1, 0, any;\n"
      "}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<int>(mine))
      : "memory");
  return any != 0;
}

}  // namespace fovea::ptx
