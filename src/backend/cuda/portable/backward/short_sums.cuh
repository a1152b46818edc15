// What the two kinds of blocks of short sequences have in common: where they are, what rows see,
// and how their warps add up what they have.
#pragma once

#include "backend/cuda/portable/backward/arguments.h"
#include "backend/cuda/portable/geometry.cuh"
#include "prim/cuda/ptx/math.cuh"
#include "prim/cuda/ptx/mma.cuh"

namespace fovea::cuda {

// Adds up what kSharing neighbouring warps hold, in slots of four values a lane, and calls
// put(slot, sum) by one of the warps for each. `memory`: the block's, of which every warp has
// another use until it comes here.
template <int kSharing, int kSlots, typename Put>
__device__ __forceinline__ void add_up_warps(unsigned char* memory, const float4 (&mine)[kSlots],
                                             Put put) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float4* const slots = reinterpret_cast<float4*>(memory) + lane;
  __syncthreads();
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) slots[(warp * kSlots + slot) * 32] = mine[slot];
  __syncthreads();
  const int first = warp / kSharing * kSharing;
#pragma unroll 1
  for (int slot = warp % kSharing; slot < kSlots; slot += kSharing) {
    float4 sum = slots[(first * kSlots + slot) * 32];
#pragma unroll
    for (int w = 1; w < kSharing; ++w) {
      const float4 x = slots[((first + w) * kSlots + slot) * 32];
      sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
    }
    put(slot, sum);
  }
}

// The slots of a warp's sums, 16 kM rows of kDim values.
template <int kDim, int kM>
struct SumSlots {
  static constexpr int kD = kDim / 16, kCount = kM * 2 * kD;

  template <int kSlots>
  static __device__ __forceinline__ void gather(float4 (&to)[kSlots], int first,
                                                const ptx::Fragment (&x)[kM][2 * kD]) {
#pragma unroll
    for (int slot = 0; slot < kCount; ++slot) {
      const int m = slot / (2 * kD), d = slot / 2 % kD, i = slot % 2 * 2;
      to[first + slot] = {x[m][2 * d][i], x[m][2 * d][i + 1], x[m][2 * d + 1][i],
                          x[m][2 * d + 1][i + 1]};
    }
  }
  static __device__ __forceinline__ int row(int slot) {
    return slot / (2 * kD) * 16 + slot % 2 * 8 + threadIdx.x % 32 / 4;
  }
  template <typename T>
  static __device__ __forceinline__ void store(T* row, int slot, const float4& x, float scale,
                                               int cols) {
    const int col = slot / 2 % kD * 16 + threadIdx.x % 4 * 2;
    const auto put = [&](int at, float first, float second) {
      if (at >= cols) return;
      *reinterpret_cast<uint32_t*>(row + at) = ptx::pack<T>(first * scale, second * scale);
    };
    put(col, x.x, x.y);
    put(col + 8, x.z, x.w);
  }
};

// Blocks of the same KV head are as many blocks apart as there are heads.
struct ShortPlace {
  int b, head_kv, rank;
  Sequence s;

  __device__ __forceinline__ ShortPlace(const BackwardArguments& a, int item) {
    int head;
    rank = divide(a.of_heads, item, head);
    b = divide(a.of_head_kv, head, head_kv);
    s = sequence_at(a.p, b);
  }
};

// What a row sees, asked without branches; a row that does not exist sees nothing.
struct ShortSight {
  int begin;
  uint32_t keys;
  int prefix;

  __device__ __forceinline__ ShortSight(const Problem& p, const Sequence& s, int i) {
    const Sight sight = sight_of(p, s, i);
    const bool exists = i < s.q_len;
    begin = sight.begin;
    keys = exists ? sight.end - sight.begin : 0;
    prefix = exists ? sight.prefix : 0;
  }
  __device__ __forceinline__ bool sees(int key) const {
    return (static_cast<uint32_t>(key - begin) < keys) | (key < prefix);
  }
};

}  // namespace fovea::cuda
