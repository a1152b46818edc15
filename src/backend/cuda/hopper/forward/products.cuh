// The two products of a block of keys, asked for by a warpgroup together, and what becomes of
// scores and values before the second.
#pragma once

#include "prim/cuda/ptx/wgmma.cuh"
#include "prim/cuda/tile/products.cuh"
#include "prim/cuda/tile/swizzled.h"

namespace fovea::cuda::hopper {

// Operands are named by their descriptors.
template <typename T, typename TileQ, typename TileK, int kCount>
__device__ __forceinline__ void issue_scores(float (&scores)[kCount], uint64_t q, uint64_t k) {
  ptx::wgmma_ss<T, true>(scores, q, k);
#pragma unroll
  for (int step = 1; step < TileQ::kColumns / 16; ++step) {
    ptx::wgmma_ss<T, false>(scores, q + tile::step_of_columns<TileQ>(step),
                            k + tile::step_of_columns<TileK>(step));
  }
  ptx::wgmma_commit();
}

template <typename T, int kOuts, int kWeights>
__device__ __forceinline__ void issue_values(float (&out)[kOuts],
                                             const uint32_t (&weights)[kWeights], uint64_t v) {
#pragma unroll
  for (int step = 0; step < kWeights / 4; ++step) {
    ptx::wgmma_rs<T>(out, weights + 4 * step, v + tile::step_of_rows(step));
  }
  ptx::wgmma_commit();
}

// Scores' places in the accumulator are those of the next product's left operand.
template <typename T, int kWeights>
__device__ __forceinline__ void pack_weights(uint32_t (&weights)[kWeights],
                                             const float (&scores)[2 * kWeights]) {
#pragma unroll
  for (int i = 0; i < kWeights; ++i) {
    weights[i] = ptx::pack<T>(scores[2 * i], scores[2 * i + 1]);
  }
}

// 16 bytes of values in shared memory, those that are not finite made zero.
template <typename T>
__device__ __forceinline__ void make_finite(uint32_t at) {
  uint32_t w[4];
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "r"(at));
#pragma unroll
  for (int x = 0; x < 4; ++x) w[x] = tile::finite_word<T>(w[x]);
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(w[0]), "r"(w[1]), "r"(w[2]),
               "r"(w[3])
               : "memory");
}

}  // namespace fovea::cuda::hopper
