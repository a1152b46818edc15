// The running softmax of the rows that one lane holds: 2 rows of each 16-row tile of its warp.
#pragma once

#include "backend/cuda/common/weight_sums.cuh"
#include "prim/cuda/ptx/math.cuh"
#include "prim/cuda/ptx/mma.cuh"

namespace fovea::cuda {

// Weights refer to a reference max. It moves only when scores outgrow it by more than kHeadroom (in
// log2 units): until then weights are up to 2^8, which neither their 16-bit form nor the float sums
// mind, and most chunks of keys need neither shuffles nor a rescaling of what was summed.
template <int kMTiles>
struct RunningSoftmax {
  static constexpr int kRows = 2 * kMTiles;
  static constexpr float kHeadroom = 8.0f;

  float reference[kRows];  // log2 units; -inf: no key seen yet
  float sum[kRows];        // of this lane's weights

  // bounded: scores are believed to be near 0, which is the reference then.
  __device__ __forceinline__ void start(bool bounded) {
    start_references(bounded);
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum[r] = 0;
  }
  __device__ __forceinline__ void start_references(bool bounded) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) reference[r] = bounded ? 0.0f : -__builtin_huge_valf();
  }

  // Moves the reference if these scores outgrow it; `out` are the sums of weighted values, rescaled
  // then. `to_log2` takes scores to log2 units.
  template <int kNTiles, int kOutTiles>
  __device__ __forceinline__ void look(const ptx::Fragment (&scores)[kMTiles][kNTiles],
                                       ptx::Fragment (&out)[kMTiles][kOutTiles], float to_log2) {
    float top[kRows];
    bool outgrown = false;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float best = scores[m][0][2 * half];
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) {
          best = fmaxf(best, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
        }
        const int r = 2 * m + half;
        top[r] = best * to_log2;
        outgrown |= top[r] > reference[r] + kHeadroom;
      }
    }
    if (__any_sync(0xffffffffu, outgrown)) move_reference(top, out);
  }

  // Weights by the reference as it is. Without a look the caller has to ask in_range at the end.
  // kMixed: so many of sixteen by multiply-adds, for kernels that wait for special functions.
  // kExponents: scores are in log2 units, and the reference is 0.
  template <int kMixed = 0, bool kExponents = false, int kNTiles>
  __device__ __forceinline__ void weigh(ptx::Fragment (&scores)[kMTiles][kNTiles], float to_log2) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      weigh_tile<kMixed>(m, scores[m], [&](int, float x, float minus_base) {
        return kExponents ? x : fmaf(x, to_log2, minus_base);
      });
    }
  }

  // The same of the rows of one tile, with exponent(index, score, minus the reference) in log2
  // units: value index % 4 of fragment index / 4.
  template <int kMixed = 0, int kNTiles, typename Exponent>
  __device__ __forceinline__ void weigh_tile(int m, ptx::Fragment (&scores)[kNTiles],
                                             Exponent exponent) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = 2 * m + half;
      const float minus_base = reference[r] == -__builtin_huge_valf() ? 0.0f : -reference[r];
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
        [[maybe_unused]] float first = 0;
#pragma unroll
        for (int x = 2 * half; x < 2 * half + 2; ++x) {
          const float y = exponent(4 * n + x, scores[n][x], minus_base);
          const float p = is_mixed<kMixed>(n % 4, x) ? ptx::exp2_cubic(y) : ptx::exp2_approx(y);
          scores[n][x] = p;
          if constexpr (kMixed == 0) {
            sum[r] += p;
          } else if (x == 2 * half) {
            first = p;
          } else {
            sum[r] += first + p;
          }
        }
      }
    }
  }

  // The same of 16 keys and the rows of one tile, where scores are in log2 units and the reference
  // is 0. Of a lane's eight values one is made by multiply-adds, two of `odd` keys: apart from each
  // other, or the time is lost again.
  __device__ __forceinline__ void weigh_exponents(int m, ptx::Fragment& left, ptx::Fragment& right,
                                                  bool odd) {
    const auto power = [](float x, bool mixed) {
      return mixed ? ptx::exp2_cubic(x) : ptx::exp2_approx(x);
    };
#pragma unroll
    for (int x = 0; x < 4; ++x) left[x] = power(left[x], odd && x == 0);
#pragma unroll
    for (int x = 0; x < 4; ++x) right[x] = power(right[x], x == (odd ? 0 : 1));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[2 * m + half] += left[2 * half] + left[2 * half + 1];
      sum[2 * m + half] += right[2 * half] + right[2 * half + 1];
    }
  }

  // Which value of which of four fragments.
  template <int kMixed>
  static constexpr bool is_mixed(int n, int x) {
    static_assert(kMixed == 0 || kMixed == 1);
    return kMixed == 1 && x == 3 && n == 3;
  }

  // Whether row r's weights, which are rounded to T, were not too large for its reference, which is
  // one of its scores; nor too small, where it is not.
  template <typename T>
  __device__ __forceinline__ bool in_range(int r, bool bounded) const {
    return sum[r] <= kMostWeightSum && (!bounded || sum[r] >= kLeastWeightSum<T>);
  }

  // The sums of the four lanes that share a row.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
      sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
    }
  }

 private:
  template <int kOutTiles>
  __device__ __forceinline__ void move_reference(float (&top)[kRows],
                                                 ptx::Fragment (&out)[kMTiles][kOutTiles]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 1));
      top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 2));
      const float moved = fmaxf(reference[r], top[r]);
      if (moved == -__builtin_huge_valf()) continue;
      const float shrink = ptx::exp2_approx(reference[r] - moved);  // 0 from no reference
      reference[r] = moved;
      sum[r] *= shrink;
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) {
        out[r / 2][n][r % 2 * 2] *= shrink;
        out[r / 2][n][r % 2 * 2 + 1] *= shrink;
      }
    }
  }
};

}  // namespace fovea::cuda
