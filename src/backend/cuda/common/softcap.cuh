// tanh, as softcap of 16-bit problems needs it.
#pragma once

#include "prim/cuda/ptx/math.cuh"

namespace fovea::cuda {

constexpr float kTanhSeries1 = 2.499943589e-01f, kTanhSeries3 = -5.182679795e-03f,
                kTanhSeries5 = 1.125095354e-04f;

// tanh(x / 4) / x for |x| < 2, to 2.3e-5 of it. Two special functions a score are more than the
// SM's units for them have time for beside an exponential; up to there this will do.
__device__ __forceinline__ float tanh_of_quarter_series(float x) {
  const float z = x * x;
  return fmaf(fmaf(kTanhSeries5, z, kTanhSeries3), z, kTanhSeries1);
}

// Any x, to 1e-7: far below what 16-bit inputs let a logit be known to.
__device__ __forceinline__ float tanh_by_exp(float x) {
  return fmaf(-2.0f, __fdividef(1.0f, 1.0f + ptx::exp2_approx(x * 2.885390082f)), 1.0f);
}

// Scores become tanh(scale_of_cap * score). kSeries: by it, where the largest of the warp's allow.
template <bool kSeries, int kCount>
__device__ __forceinline__ void cap_scores(float (&scores)[kCount], float scale_of_cap) {
  if constexpr (!kSeries) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scores[i] = tanh_by_exp(scores[i] * scale_of_cap);
    return;
  }
  const float unit = 4.0f * scale_of_cap;
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    scores[i] *= unit;
    bits |= __float_as_uint(scores[i]);
  }
  // Of 2 and more, and of what is not finite, the top bit of the exponent is set.
  if (__all_sync(0xffffffffu, (bits & 0x40000000u) == 0)) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scores[i] *= tanh_of_quarter_series(scores[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scores[i] = tanh_by_exp(0.25f * scores[i]);
  }
}

}  // namespace fovea::cuda
