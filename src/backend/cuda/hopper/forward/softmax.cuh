// The running softmax of the two rows that a lane holds.
//
// Weights refer to a score of the row, its reference, and sums and outputs are divided at the end:
// any reference that keeps them within the range of their types gives the same result. Where rows
// see all keys of a block the reference is not looked for (weigh_boldly): sums show when weights
// have become large, and a power of two then takes everything back, exactly. What grew too fast
// even for that is found at the end, by needed_care.
#pragma once

#include "backend/cuda/common/weight_sums.cuh"
#include "backend/cuda/hopper/forward/shared.cuh"
#include "prim/cuda/ptx/math.cuh"
#include "prim/cuda/ptx/registers.cuh"

namespace fovea::cuda::hopper {

struct Softmax {
  static constexpr float kNone = -__builtin_huge_valf();
  static constexpr float kHeadroom = 8.0f;  // log2: what scores may exceed the reference by
  static constexpr float kLarge = 0x1p15f;  // a lane's sum of a block: the weights still fit f16
  static constexpr float kWild = 384.0f;    // log2: scores of a row that are so far apart
  static constexpr uint32_t kNaN = 0x7fffffffu, kSign = 0x80000000u;

  float reference[2];  // log2 units; kNone: no key seen yet
  float sum[2];        // of this lane's weights
  float factor[2];     // by which weights before have to be multiplied, after a reference moved

  __device__ __forceinline__ void start() {
    reference[0] = reference[1] = kNone;
    sum[0] = sum[1] = 0;
  }

  // Whether scores are so different that those of later blocks will outgrow references too fast.
  template <int kCount>
  static __device__ __forceinline__ bool are_wild(const float (&scores)[kCount], float to_log2) {
    float apart = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = scores[2 * half], low = top;
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
        const float x = scores[4 * j + 2 * half], y = scores[4 * j + 2 * half + 1];
        top = fmaxf(top, fmaxf(x, y));
        low = fminf(low, fminf(x, y));
      }
      apart = fmaxf(apart, (top - low) * to_log2);
    }
    return apart > kWild;
  }

  // Whether any is past a series' limit.
  template <int kCount>
  static __device__ __forceinline__ bool are_past(const float (&scores)[kCount],
                                                  const CapSeries& cap) {
    uint32_t below = kSign;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      below &= __float_as_uint(fmaf(scores[i], scores[i], cap.minus_square));
    }
    return below == 0;
  }

  // Moves the references that these scores outgrow; whether any of the warp's did. `to_log2` takes
  // scores to log2 units.
  template <int kCount>
  __device__ __forceinline__ bool look(const float (&scores)[kCount], float to_log2) {
    float top[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float even = scores[2 * half], odd = scores[2 * half + 1];
#pragma unroll
      for (int j = 1; j < kCount / 4; ++j) {
        even = fmaxf(even, scores[4 * j + 2 * half]);
        odd = fmaxf(odd, scores[4 * j + 2 * half + 1]);
      }
      top[half] = fmaxf(even, odd) * to_log2;
    }
    const bool outgrown = top[0] > reference[0] + kHeadroom || top[1] > reference[1] + kHeadroom;
    if (!__any_sync(0xffffffffu, outgrown)) return false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& t = top[half];
      t = fmaxf(t, __shfl_xor_sync(0xffffffffu, t, 1));
      t = fmaxf(t, __shfl_xor_sync(0xffffffffu, t, 2));
      const float moved = fmaxf(reference[half], t);
      factor[half] = moved == kNone ? 1.0f : ptx::exp2_approx(reference[half] - moved);
      reference[half] = moved;
      sum[half] *= factor[half];
    }
    return true;
  }

  template <int kCount>
  __device__ __forceinline__ void weigh(float (&scores)[kCount], float to_log2) {
    float grown[2];
    const float base[2] = {reference[0] == kNone ? 0.0f : reference[0],
                           reference[1] == kNone ? 0.0f : reference[1]};
    weigh_by(scores, base, grown, [&](float x, float minus) { return fmaf(x, to_log2, -minus); });
  }

  // Whether some weights of the warp have become so large that `shrink` has to follow.
  template <int kCount>
  __device__ __forceinline__ bool weigh_boldly(float (&scores)[kCount], float to_log2) {
    weigh_by(scores, reference, factor,
             [&](float x, float base) { return fmaf(x, to_log2, -base); });
    return __any_sync(0xffffffffu, fmaxf(factor[0], factor[1]) > kLarge);
  }

  // The same of scores that softcap has yet to bound. Those past the series' limit make weights
  // count as too large for anything but doing the tile again.
  template <int kCount>
  __device__ __forceinline__ bool cap_and_weigh_boldly(float (&scores)[kCount],
                                                       const CapSeries& cap) {
    uint32_t below = kSign;
    weigh_by(scores, reference, factor, [&](float x, float base) {
      const float lack = fmaf(x, x, cap.minus_square);
      below &= __float_as_uint(lack);
      return fmaf(fmaf(cap.third, lack, cap.first), x, -base);
    });
    if (below == 0) factor[0] = __builtin_huge_valf();
    return __any_sync(0xffffffffu, fmaxf(factor[0], factor[1]) > kLarge);
  }

  // After weigh_boldly: takes weights and sums back by powers of two.
  template <int kCount>
  __device__ __forceinline__ void shrink(float (&weights)[kCount]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float grown = factor[half];
      grown = fmaxf(grown, __shfl_xor_sync(0xffffffffu, grown, 1));
      grown = fmaxf(grown, __shfl_xor_sync(0xffffffffu, grown, 2));
      const int bits = grown > kLarge ? static_cast<int>(__float_as_uint(grown) >> 23) - 127 : 0;
      // Past the range of floats, and just below, NaN goes into the sums, which the end will find.
      factor[half] = __uint_as_float(bits > 126 ? kNaN : static_cast<uint32_t>(127 - bits) << 23);
      reference[half] += static_cast<float>(bits);
      sum[half] *= factor[half];
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
        weights[4 * j + 2 * half] *= factor[half];
        weights[4 * j + 2 * half + 1] *= factor[half];
      }
    }
  }

  // After a reference moved.
  template <int kCount>
  __device__ __forceinline__ void rescale(float (&out)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) out[i] *= factor[i / 2 % 2];
  }

  // The sums of the four lanes that share a row.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
    }
  }

  // What it takes for these results to be trusted.
  template <int kCount>
  __device__ __forceinline__ int needed_care(const float (&out)[kCount]) const {
    if (!(sum[0] < kMostWeightSum && sum[1] < kMostWeightSum)) return kSafe | kClean;
    float zero[4] = {0, 0, 0, 0};  // NaN when an output is not finite
#pragma unroll
    for (int i = 0; i < kCount; ++i) zero[i % 4] = fmaf(out[i], 0.0f, zero[i % 4]);
    return (zero[0] + zero[1]) + (zero[2] + zero[3]) == 0 ? kBold : kClean;
  }

 private:
  // `exponent`: of a score and its row's base.
  template <int kCount, typename Exponent>
  __device__ __forceinline__ void weigh_by(float (&scores)[kCount], const float (&base)[2],
                                           float (&grown)[2], const Exponent& exponent) {
    float even[2] = {0, 0}, odd[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& x = scores[4 * j + 2 * half];
        float& y = scores[4 * j + 2 * half + 1];
        x = ptx::exp2_approx(exponent(x, base[half]));
        y = ptx::exp2_approx(exponent(y, base[half]));
        even[half] += x;
        odd[half] += y;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      grown[half] = even[half] + odd[half];
      sum[half] += grown[half];
    }
  }
};

}  // namespace fovea::cuda::hopper
