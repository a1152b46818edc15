// A ring of stages in shared memory between one producer and its consumers: full barriers say that
// a stage has been filled, empty ones that it may be filled again. Each side counts for itself.
#pragma once

#include "prim/cuda/ptx/ldmatrix.cuh"
#include "prim/cuda/ptx/mbarrier.cuh"

namespace fovea::tile {

template <int kStages>
struct RingBarriers {
  uint64_t full[kStages], empty[kStages];

  // By one thread. `consumers`: arrivals that free a stage; `producers`: that fill it, besides
  // bytes.
  __device__ __forceinline__ void init(int consumers, int producers = 1) {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(ptx::shared_address(&full[stage]), producers);
      ptx::mbarrier_init(ptx::shared_address(&empty[stage]), consumers);
    }
  }
};

// One side's place in a ring.
template <int kStages>
class Ring {
 public:
  __device__ __forceinline__ explicit Ring(const RingBarriers<kStages>& barriers)
      : full_(ptx::shared_address(barriers.full)), empty_(ptx::shared_address(barriers.empty)) {}

  __device__ __forceinline__ int stage() const { return count_ % kStages; }
  __device__ __forceinline__ void advance() { ++count_; }

  // Producer: waits for the stage, and says how many bytes are coming; they arrive at full().
  __device__ __forceinline__ void acquire(int bytes) {
    ptx::mbarrier_wait(empty_ + 8 * stage(), parity() ^ 1);
    ptx::mbarrier_arrive_expect(full(), bytes);
  }
  __device__ __forceinline__ uint32_t full() const { return full_ + 8 * stage(); }

  // Consumers.
  __device__ __forceinline__ void wait() const { ptx::mbarrier_wait(full(), parity()); }
  // Of one thread a warp.
  __device__ __forceinline__ void release() const { ptx::mbarrier_arrive(empty_ + 8 * stage()); }

 private:
  __device__ __forceinline__ int parity() const { return count_ / kStages & 1; }

  const uint32_t full_, empty_;
  int count_ = 0;
};

// The same for those who count themselves: what is the n-th to go through the ring.
template <int kStages>
class NumberedRing {
 public:
  __device__ __forceinline__ explicit NumberedRing(const RingBarriers<kStages>& barriers)
      : full_(ptx::shared_address(barriers.full)), empty_(ptx::shared_address(barriers.empty)) {}

  static __device__ __forceinline__ int stage(int n) { return n % kStages; }
  __device__ __forceinline__ void wait_for_room(int n) const {
    ptx::mbarrier_wait(empty_ + 8 * stage(n), parity(n) ^ 1);
  }
  __device__ __forceinline__ uint32_t full(int n) const { return full_ + 8 * stage(n); }
  __device__ __forceinline__ void wait(int n) const { ptx::mbarrier_wait(full(n), parity(n)); }
  // Of one thread a warp.
  __device__ __forceinline__ void release(int n) const {
    ptx::mbarrier_arrive(empty_ + 8 * stage(n));
  }

 private:
  static __device__ __forceinline__ int parity(int n) { return n / kStages & 1; }

  const uint32_t full_, empty_;
};

}  // namespace fovea::tile
