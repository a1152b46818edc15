// Clusters of blocks that reach each other's shared memory (compute capability 9.0 and later).
#pragma once

#include <cstdint>

// Of a kernel whose blocks come in clusters of two.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define FOVEA_IN_PAIRS
#else
#define FOVEA_IN_PAIRS __cluster_dims__(2, 1, 1)
#endif

namespace fovea::ptx {

// Until all threads of the cluster have come; what they wrote can be read.
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
#endif
}

// An address of this block's shared memory, of another block's instead; neighbours stay neighbours.
__device__ __forceinline__ uint32_t shared_address_of(uint32_t shared, int rank) {
  uint32_t there = shared;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared), "r"(rank));
#endif
  return there;
}

__device__ __forceinline__ void store_in_cluster(uint32_t there, uint32_t x) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(there), "r"(x) : "memory");
#endif
}
__device__ __forceinline__ void store_in_cluster(uint32_t there, const uint4& x) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(there), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w)
               : "memory");
#endif
}

}  // namespace fovea::ptx
