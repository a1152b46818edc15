// TMA: boxes of a tensor of four dimensions between global and shared memory. Coordinates are in
// elements, the innermost dimension first; what lies outside of the tensor reads as zero and is not
// written.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace fovea::ptx {

struct BoxAt {
  int x, y, z, w;
};

__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Arrives at the barrier by the bytes of the box.
__device__ __forceinline__ void tma_load(uint32_t shared, const CUtensorMap& map, BoxAt at,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w)
      : "memory");
}

// `bytes` that lie side by side, to the same place in all blocks of a cluster that `blocks` has a
// bit of, and arrives at the barrier that each of them has in one place; all multiples of 16.
__device__ __forceinline__ void bulk_load_to_cluster(uint32_t shared, const void* from, int bytes,
                                                     uint32_t barrier, int blocks) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared),
      "l"(from), "r"(bytes), "r"(barrier), "h"(static_cast<uint16_t>(blocks))
      : "memory");
}

__device__ __forceinline__ void tma_store(const CUtensorMap& map, BoxAt at, uint32_t shared) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          &map),
      "r"(shared), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w)
      : "memory");
}

__device__ __forceinline__ void tma_commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until this thread's stores have read shared memory.
__device__ __forceinline__ void tma_wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// Until they have been written.
__device__ __forceinline__ void tma_wait_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Lets TMA and wgmma see what this thread wrote to shared memory.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace fovea::ptx
