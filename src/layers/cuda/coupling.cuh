// The coupling of q with k, and of their gradients: what a head's channels get from the other
// heads.
#pragma once

#include "layers/cuda/rows.cuh"

namespace fovea::layers::cuda {

enum class Coupled { kNone, kAllHeads, kGroup };

// Forward, x is q and k before the convolutions; backward, the gradients after them. The weights
// are what tells the two apart.
struct Coupling {
  Coupled kind = Coupled::kNone;
  int heads = 0, heads_kv = 0, dim = 0;
  float from_q = 0, from_k = 0;  // weights of what heads of q, and of k, give to the others
  Rows x;
  float* sums = nullptr;  // [tokens, 2, dim], kAllHeads: what all heads of q give, and all of k

  static Coupling of(Coupled kind, int heads, int heads_kv, int dim, bool forward) {
    Coupling c;
    c.kind = kind;
    c.heads = heads;
    c.heads_kv = heads_kv;
    c.dim = dim;
    const auto q = static_cast<float>(heads), k = static_cast<float>(heads_kv);
    if (kind == Coupled::kAllHeads) {  // half a mean, of which each head's share comes back
      c.from_q = 0.5f / (forward ? q : k);
      c.from_k = 0.5f / (forward ? k : q);
    } else {  // of the mean of q and k, besides the half that both have
      c.from_q = forward ? k / q : 1;
      c.from_k = forward ? 1 : k / q;
    }
    return c;
  }

  // What channels i to i + 7 of a head get.
  template <typename T>
  __device__ __forceinline__ Eight share(int token, RowAt at, int head, int i) const {
    const bool is_q = head < heads;
    if (kind == Coupled::kAllHeads) {
      return load_eight(sums + (int64_t{token} * 2 + is_q) * dim + i);
    }
    Eight sum{};
    if (kind == Coupled::kNone) return sum;
    const T* const row = x.template at<T>(at.b, at.r) + i;
    const int group = heads / heads_kv;
    if (is_q) {
      add(sum, load_eight(row + (heads + head / group) * dim), 0.5f * from_k);
    } else {
      const T* q = row + (head - heads) * group * dim;
      for (int h = 0; h < group; ++h, q += dim) add(sum, load_eight(q), 0.5f * from_q);
    }
    add(sum, load_eight(row + head * dim), 0.5f);
    return sum;
  }
};

// The lanes that hold a head, eight channels each: a power of two, so that warps hold whole heads.
struct HeadLanes {
  int lanes = 1;

  static HeadLanes of(int dim) { return {static_cast<int>(std::bit_ceil(unsigned(dim) / 8))}; }
  __device__ __forceinline__ int at_once() const { return 32 / lanes; }
  __device__ __forceinline__ int head() const { return threadIdx.x % 32 / lanes; }  // of the warp's
  __device__ __forceinline__ int channel() const { return threadIdx.x % lanes * 8; }
  __device__ __forceinline__ float sum(float x) const {
    for (int step = 1; step < lanes; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
  }
};

// Sums over a token's heads, by a warp.
struct HeadSums {
  Eight q{}, k{};

  __device__ __forceinline__ void add_head(bool is_q, const Eight& x) {
    // By a branch: a reference to either would take both out of registers.
    if (is_q) {
      add(q, x);
    } else {
      add(k, x);
    }
  }
  __device__ __forceinline__ void store(const Coupling& coupling, const HeadLanes& lanes,
                                        int token) {
#pragma unroll 1
    for (int step = lanes.lanes; step < 32; step *= 2) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        q.x[i] += __shfl_xor_sync(0xffffffffu, q.x[i], step);
        k.x[i] += __shfl_xor_sync(0xffffffffu, k.x[i], step);
      }
    }
    const int dim = coupling.dim, i = lanes.channel();
    if (lanes.head() != 0 || i >= dim) return;
    float* const to = coupling.sums + int64_t{token} * 2 * dim + i;
    scale(q, coupling.from_q);
    scale(k, coupling.from_k);
    store_eight(to, q);
    store_eight(to + dim, k);
  }
};

}  // namespace fovea::layers::cuda
