// mbarrier: a barrier in shared memory that counts arrivals and, for copies by TMA, bytes. A wait
// names the parity of the phase that it waits for; a fresh barrier's phase 0 is under way.
#pragma once

#include <cstdint>

namespace fovea::ptx {

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes fresh barriers known to copies by TMA.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and lets the phase wait for `bytes` more.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over_%=;\n"
      "bra again_%=;\n"
      "over_%=:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace fovea::ptx
