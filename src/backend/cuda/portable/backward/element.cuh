// One element of the backward pass: from the products q . k and dout . v to the weight and to the
// gradient of the score.
#pragma once

#include "backend/cuda/portable/backward/arguments.h"
#include "backend/cuda/portable/terms.cuh"

namespace fovea::cuda {

// The NaN that delta is where dout is not finite: other NaNs come from out, and do not reach dv.
constexpr uint32_t kBadDout = 0x7fc0d007u;

// Of one query row.
struct RowStats {
  float lse2, delta;
};

struct Gradient {
  float weight;  // as it multiplies v: after dropout
  float score;   // d loss / d (scale * q . k)
  float bias;    // d loss / d bias
};

// Of a weight of 2^x; `dp` is dout . v - delta.
__device__ __forceinline__ Gradient gradient_at(float x, float dp) {
  const float w = ptx::exp2_approx(x);
  return {w, w * dp, w * dp};
}

// With a positive scale and no other term, or one that the product began at.
__device__ __forceinline__ Gradient plain_gradient_of(const Problem& p, float raw, float dp,
                                                      float lse2) {
  return gradient_at(fmaf(raw, p.scale * kLog2e, -lse2), dp);
}

// With every term; `dp` is dout . v. Elements that a mask hides give exact zeros, whatever the
// products hold.
template <typename T>
__device__ __forceinline__ Gradient gradient_of(const Problem& p, const TermRow& terms, int key,
                                                float raw, float dp, RowStats stats, float keep) {
  float slope = 1;
  const float x = logit<T>(p, terms, key, raw, &slope);
  if (x == -kInfinity) return {0, 0, 0};
  const float w = ptx::exp2_approx(fmaf(x, kLog2e, -stats.lse2));
  const float ds = w * (dp * keep - stats.delta);
  return {w * keep, ds * slope, ds};
}

// Index into delta and lse2 of row (head_q, i).
__device__ __forceinline__ int64_t stat_index(const BackwardArguments& a, const Sequence& s,
                                              int head_q, int i) {
  return (static_cast<int64_t>(s.batch_at) * a.p.head_q + head_q) * a.stat_rows + s.q_row + i;
}

}  // namespace fovea::cuda
