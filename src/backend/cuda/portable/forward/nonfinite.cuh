// Weights of zero must not meet NaN or Inf in a product. Tiles of which some key is hidden from some
// row are therefore freed of them in shared memory, and what was hidden is added at the end to the
// outputs that do see it. Both are rare: finite tiles pay one look.
#pragma once

#include "backend/cuda/portable/terms.cuh"
#include "prim/cuda/tile/shared_tile.cuh"

namespace fovea::cuda {

template <typename T>
struct Exponent;
template <>
struct Exponent<__nv_bfloat16> {
  static constexpr uint32_t kMask = 0x7f80;
};
template <>
struct Exponent<__half> {
  static constexpr uint32_t kMask = 0x7c00;
};

// A pair of 16-bit values with those that are not finite made zero.
template <typename T>
__device__ __forceinline__ uint32_t finite_pair(uint32_t pair) {
  constexpr uint32_t kMask = Exponent<T>::kMask;
  if ((pair & kMask) == kMask) pair &= 0xffff0000u;
  if ((pair >> 16 & kMask) == kMask) pair &= 0x0000ffffu;
  return pair;
}

// For the whole block: whether the tile held any.
template <typename Tile, int kThreads, typename T>
__device__ __forceinline__ bool hide_nonfinite(uint32_t shared) {
  bool found = false;
  for (int at = threadIdx.x * 16; at < Tile::kBytes; at += kThreads * 16) {
    uint32_t w[4], clean[4];
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(shared + at));
    bool here = false;
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      clean[x] = finite_pair<T>(w[x]);
      here |= clean[x] != w[x];
    }
    if (here) {
      asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(shared + at), "r"(clean[0]),
                   "r"(clean[1]), "r"(clean[2]), "r"(clean[3])
                   : "memory");
      found = true;
    }
  }
  return __syncthreads_or(found);
}

// Rows [row, row + rows) of a KV head and keys [key_begin, key_end).
struct BlockRange {
  int b, head_kv, row, rows, key_begin, key_end;
};

template <typename T>
__device__ __noinline__ void add_nonfinite(const ForwardArguments& a, BlockRange range,
                                           Sequence s, float* partial) {
  const Problem& p = a.p;
  const T* const v = static_cast<const T*>(a.v.data) + s.batch_at * a.v.batch +
                     range.head_kv * a.v.head + s.kv_row * a.v.row;
  for (int d = threadIdx.x; d < p.dim_v; d += blockDim.x) {
    for (int key = range.key_begin; key < range.key_end; ++key) {
      const float x = ptx::to_float(v[key * a.v.row + d]);
      if (x - x == 0) continue;
      for (int r = 0; r < range.rows; ++r) {
        const Row row = Row::at(s, range.row + r);
        const int head = range.head_kv * p.group + row.head;
        if (!sight_of(p, s, row.i).sees(key)) continue;
        const TermRow terms = term_row<T>(p, s, range.b, head, row.i);
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
