// Clusters of blocks that reach each other's shared memory (compute capability 9.0 and later).
#pragma once

#include <cstdint>

// Of a kernel whose blocks come in clusters of so many.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define FOVEA_IN_CLUSTERS_OF(blocks)
#else
#define FOVEA_IN_CLUSTERS_OF(blocks) __cluster_dims__(blocks, 1, 1)
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

// Of another block, once it has been there at a cluster_sync.
__device__ __forceinline__ float2 load_in_cluster(uint32_t there) {
  float2 x{};
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(there));
#endif
  return x;
}

}  // namespace fovea::ptx
