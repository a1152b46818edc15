// Softcap or ALiBi, of 16-bit problems: terms that a few instructions a score give, none of which
// waits for memory.
#pragma once

#include "backend/cuda/portable/forward/place.cuh"
#include "backend/cuda/portable/forward/softmax.cuh"
#include "backend/cuda/portable/terms.cuh"
#include "prim/cuda/tile/products.cuh"

namespace fovea::cuda {

template <typename T, int kM>
class ComputedTerms {
 public:
  // `rows`: 8 bytes of shared memory for each of the block's rows.
  __device__ __forceinline__ ComputedTerms(const Problem& p, const Place& place, uint32_t rows)
      : p_(p), place_(place), rows_(rows) {}

  // The warp's rows: what a step away from the key costs, in units of the product, and the position
  // of the row. Those past the last are taken for the first.
  __device__ __forceinline__ void find_rows() const {
    if (p_.alibi == nullptr || lane() >= 16 * kM) return;
    const int in_tile = static_cast<int>(threadIdx.x) / 32 * 16 * kM + lane();
    const Row row = place_.span.of(place_.s, in_tile < place_.rows ? in_tile : 0);
    const int head = place_.head_kv * p_.group + row.head;
    const float slope = p_.alibi[place_.b * p_.alibi_batch + head * p_.alibi_head];
    const int position = row.i + place_.s.kv_len - place_.s.q_len;
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(rows_ + in_tile * 8),
                 "f"(-slope * p_.inverse_scale), "f"(static_cast<float>(position))
                 : "memory");
  }

  // What takes scores to log2 units once they are finished.
  __device__ __forceinline__ float to_log2() const {
    return (p_.alibi == nullptr ? p_.softcap : p_.scale) * kLog2e;
  }

  // Whether the first keys that a row looks at tell how large its scores get: not if those that are
  // nearest come later. Keys then lie before all rows that see them.
  __device__ __forceinline__ bool foreseeable() const {
    return p_.alibi == nullptr || (p_.right == 0 && p_.prefix == 0);
  }

  // What the scores of keys first .. begin at, in units of the product. kBefore: the keys lie
  // before the rows.
  template <bool kBefore, int kN>
  __device__ __forceinline__ void start(ptx::Fragment (&scores)[kM][kN], int first) const {
    if (p_.alibi == nullptr) {
      tile::clear(scores);
      return;
    }
    const auto key = static_cast<float>(first + lane() % 4 * 2);
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      const float2 row = tile::load_float2(rows_ + row_in_tile<kM>(r) * 8);
      const float slope = row.x, distance = row.y - key;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const auto step = static_cast<float>(n * 8 + e);
          scores[r / 2][n][r % 2 * 2 + e] =
              kBefore ? fmaf(slope, -step, slope * distance) : slope * fabsf(distance - step);
        }
      }
    }
  }

  // tanh of what softcap bounds, in units of its bound.
  template <int kN>
  __device__ __forceinline__ void finish(ptx::Fragment (&scores)[kM][kN]) const {
    if (p_.alibi != nullptr) return;
    if (to_quarters(scores)) {
      tile::map(scores, [](float x) { return odd_series(x, 1.0f) * x; });
    } else {
      tile::map(scores, [](float x) { return tanh_for<T>(0.25f * x); });
    }
  }

  // finish and RunningSoftmax::weigh in one.
  template <int kN>
  __device__ __forceinline__ void weigh(RunningSoftmax<kM>& softmax,
                                        ptx::Fragment (&scores)[kM][kN]) const {
    const float unit = to_log2();
    if (p_.alibi != nullptr) {
      softmax.weigh(scores, unit);
    } else if (to_quarters(scores)) {
      softmax.weigh_by(scores, [&](float x, float minus_base) {
        return fmaf(odd_series(x, unit), x, minus_base);
      });
    } else {
      tile::map(scores, [](float x) { return tanh_for<T>(0.25f * x); });
      softmax.weigh(scores, unit);
    }
  }

 private:
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

  // Scores as quarters of the bound: x is 4 scale q . k / softcap. Whether all of the warp's are
  // below half of the bound, as most are. Two exponentials a score are more than the SM's special
  // function units have time for; up to there a short series will do.
  template <int kN>
  __device__ __forceinline__ bool to_quarters(ptx::Fragment (&scores)[kM][kN]) const {
    const float unit = 4.0f * p_.scale_of_cap;
    uint32_t bits = 0;
    tile::map(scores, [&](float x) {
      bits |= __float_as_uint(x * unit);
      return x * unit;
    });
    // Of 2 and more, and of what is not finite, the top bit of the exponent is set.
    return __all_sync(0xffffffffu, (bits & 0x40000000u) == 0);
  }

  // unit * tanh(x / 4) / x for |x| < 2, to 2.3e-5 of it.
  static __device__ __forceinline__ float odd_series(float x, float unit) {
    const float z = x * x;
    return fmaf(fmaf(1.125095354e-04f * unit, z, -5.182679795e-03f * unit), z,
                2.499943589e-01f * unit);
  }

  const Problem& p_;
  const Place& place_;
  const uint32_t rows_;
};

}  // namespace fovea::cuda
