// Weights of zero must not meet NaN or Inf in a product. Tiles of which some key is hidden from
// some row are therefore freed of them in shared memory, and what was hidden is added at the end to
// the outputs that do see it. Both are rare: finite tiles pay one look.
#pragma once

#include "backend/cuda/portable/terms.cuh"
#include "prim/cuda/tile/products.cuh"

namespace fovea::cuda {

// For the whole block: whether the tile held any.
template <typename T, typename Tile, int kThreads>
__device__ __forceinline__ bool hide_nonfinite(uint32_t shared) {
  bool found = false;
  for (int x = threadIdx.x; x < Tile::kRows * Tile::kChunks; x += kThreads) {
    const uint32_t at = shared + Tile::offset(x / Tile::kChunks, x % Tile::kChunks);
    const uint4 words = tile::load_16(at);
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
    uint32_t clean[4];
    bool here = false;
#pragma unroll
    for (int y = 0; y < 4; ++y) {
      clean[y] = tile::finite_word<T>(w[y]);
      here |= clean[y] != w[y];
    }
    if (here) {
      asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(clean[0]), "r"(clean[1]),
                   "r"(clean[2]), "r"(clean[3])
                   : "memory");
      found = true;
    }
  }
  return __syncthreads_or(found);
}

template <typename T>
__device__ __noinline__ void add_nonfinite(const ForwardArguments& a, const Place& place,
                                           float* partial) {
  const Problem& p = a.p;
  const Sequence s = place.s;
  const T* const v = static_cast<const T*>(a.v.data) + s.batch_at * a.v.batch +
                     place.head_kv * a.v.head + s.kv_row * a.v.row;
  for (int d = threadIdx.x; d < p.dim_v; d += blockDim.x) {
    for (int key = place.key_begin; key < place.key_end; ++key) {
      const float x = ptx::to_float(v[key * a.v.row + d]);
      if (x - x == 0) continue;
      for (int r = 0; r < place.rows; ++r) {
        const Row row = Row::at(s, place.row + r);
        const int head = place.head_kv * p.group + row.head;
        if (!sight_of(p, s, row.i).sees(key)) continue;
        const TermRow terms = term_row<T>(p, s, place.b, head, row.i);
        if (logit<T>(p, terms, key, 0, nullptr) == -kInfinity) continue;
        if (partial != nullptr) {
          partial[static_cast<int64_t>(r) * p.dim_v + d] += x;
        } else {
          T* const out = static_cast<T*>(a.out.data) + s.batch_at * a.out.batch +
                         head * a.out.head + (s.q_row + row.i) * a.out.row + d;
          *out = ptx::from_float<T>(ptx::to_float(*out) + x);
        }
      }
    }
  }
}

}  // namespace fovea::cuda
