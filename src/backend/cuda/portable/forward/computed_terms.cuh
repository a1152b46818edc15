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

  // Which of the two it is.
  __device__ __forceinline__ bool alibi() const { return p_.alibi != nullptr; }

  // Whether the first keys that a row looks at tell how large its scores get: not if those that are
  // nearest come later. Keys then lie before all rows that see them.
  __device__ __forceinline__ bool foreseeable() const {
    return !alibi() || (p_.right == 0 && p_.prefix == 0);
  }

  // What the scores of keys first .. begin at with ALiBi, in units of the product. kBefore: the
  // keys lie before the rows.
  template <bool kBefore, int kN>
  __device__ __forceinline__ void start(ptx::Fragment (&scores)[kM][kN], int first) const {
    // Worked out wherever it is asked for: there is no register to keep it in.
    uint32_t thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    const auto key = static_cast<float>(first + static_cast<int>(thread % 4 * 2));
    const uint32_t rows = rows_ + (thread / 32 * 16 * kM + thread % 32 / 4) * 8;
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      const float2 row = tile::load_float2(rows + r * 8 * 8);
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
  __device__ __forceinline__ void cap(ptx::Fragment (&scores)[kM][kN]) const {
    if (to_quarters(scores)) {
      tile::map(scores, [](float x) { return tanh_of_quarter_series(x) * x; });
    } else {
      tile::map(scores, [](float x) { return tanh_for<T>(0.25f * x); });
    }
  }

  // cap and RunningSoftmax::weigh in one. Below a quarter of the bound tanh is a cubic (to 7.8e-6
  // of the bound), below half of it the series of cap, both with factors that take scores to log2
  // units besides. They are polynomials in what the square of a score lacks to that of the limit,
  // whose sign tells that the score is below it. `use` is called with the weights in `scores`: no
  // branch lies between most weights and their use, so the two go on side by side.
  template <int kN, typename Use>
  __device__ __forceinline__ void cap_and_weigh(RunningSoftmax<kM>& softmax,
                                                ptx::Fragment (&scores)[kM][kN], Use use) const {
    constexpr float kCubic1 = 9.9984342e-01f, kCubic3 = -3.2319887e-01f;
    constexpr float kMostBound = 64;  // of larger ones the cubic would not be near enough
    float unit = p_.softcap * kLog2e, scale = p_.scale_of_cap;
    asm volatile("" : "+f"(unit), "+f"(scale));  // or what follows would be kept in registers
    const float quarter = p_.softcap > kMostBound ? 0.0f : 0.25f * p_.softcap * p_.inverse_scale;
    const float square = quarter * quarter;
    ptx::Fragment lacks[kM][kN];
    uint32_t below = kSign;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int i = 0; i < 4 * kN; ++i) {
        const float x = scores[m][i / 4][i % 4], lack = fmaf(x, x, -square);
        lacks[m][i / 4][i % 4] = lack;
        below &= __float_as_uint(lack);
      }
    }
    const auto weigh = [&](auto exponent) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        softmax.weigh_tile(m, scores[m], [&](int i, float x, float minus_base) {
          return exponent(x, lacks[m][i / 4][i % 4], minus_base);
        });
      }
    };
    if (__all_sync(0xffffffffu, below != 0)) {
      const float first = unit * scale * (kCubic1 + kCubic3 / 16);
      const float third = unit * scale * scale * scale * kCubic3;
      weigh([&](float x, float z, float minus_base) {
        return fmaf(fmaf(third, z, first), x, minus_base);
      });
      use();
      return;
    }
    const float half = 0.5f * p_.softcap * p_.inverse_scale, farther = square - half * half;
    below = kSign;
    tile::map(lacks, [&](float x) {
      below &= __float_as_uint(x + farther);
      return x + farther;
    });
    if (__all_sync(0xffffffffu, below != 0)) {
      const float four = 4 * scale, powers = unit * four;
      const float first = powers * (kTanhSeries1 + 4 * kTanhSeries3 + 16 * kTanhSeries5);
      const float third = powers * four * four * (kTanhSeries3 + 8 * kTanhSeries5);
      const float fifth = powers * four * four * four * four * kTanhSeries5;
      weigh([&](float x, float z, float minus_base) {
        return fmaf(fmaf(fmaf(fifth, z, third), z, first), x, minus_base);
      });
    } else {
      weigh([&](float x, float, float minus_base) {
        return fmaf(tanh_for<T>(x * scale), unit, minus_base);
      });
    }
    use();
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

  static constexpr uint32_t kSign = 0x80000000u;

  const Problem& p_;
  const Place& place_;
  const uint32_t rows_;
};

}  // namespace fovea::cuda
