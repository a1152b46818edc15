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

  // What channels `channel` and the next get.
  template <typename T>
  __device__ float2 pair(int token, RowAt at, int channel) const {
    if (kind == Coupled::kNone) return {0, 0};
    const int head = channel / dim, i = channel - head * dim;
    const bool is_q = head < heads;
    if (kind == Coupled::kAllHeads) {
      return *reinterpret_cast<const float2*>(sums + (int64_t{token} * 2 + is_q) * dim + i);
    }
    const T* const row = x.template at<T>(at.b, at.r);
    const int group = heads / heads_kv;
    const float2 own = load_pair(row + channel);
    if (is_q) return 0.5f * (own + from_k * load_pair(row + (heads + head / group) * dim + i));
    float2 sum{0, 0};
    const T* q = row + (head - heads) * group * dim + i;
    for (int h = 0; h < group; ++h, q += dim) sum = sum + load_pair(q);
    return 0.5f * (own + from_q * sum);
  }

  // One pair of a token's sums, of 2 * dim / 2.
  template <typename T>
  __device__ void sum_heads(int token, RowAt at, int pair) const {
    const int of_k = pair >= dim / 2, i = 2 * pair - of_k * dim;
    const T* from = x.template at<T>(at.b, at.r) + of_k * heads * dim + i;
    float2 sum{0, 0};
#pragma unroll 4
    for (int h = 0; h < (of_k ? heads_kv : heads); ++h, from += dim) sum = sum + load_pair(from);
    store_pair(sums + (int64_t{token} * 2 + of_k) * dim + i, (of_k ? from_k : from_q) * sum);
  }
};

}  // namespace fovea::layers::cuda
