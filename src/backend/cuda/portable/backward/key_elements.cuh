// What happens between the products of a block of keys: q . k and dout . v become weights and
// gradients of scores. Fragments have keys for rows and queries for columns.
#pragma once

#include "backend/cuda/portable/backward/element.cuh"
#include "backend/cuda/portable/backward/key_terms.cuh"
#include "backend/cuda/portable/backward/ladder.cuh"

namespace fovea::cuda {

template <typename T, int kM, int kTileQ, Terms kTerms>
class KeyElements {
  static constexpr bool kAnyTerms = kTerms == Terms::kAny;

 public:
  // `stats`: of a rung's rows, [lse2, delta, sight (two), term (two)][kTileQ].
  __device__ __forceinline__ KeyElements(const BackwardArguments& a, const RungPlace& place,
                                         const float* stats)
      : a_(a), place_(place), stats_(stats) {}

  // The products dout . v begin at -delta, which they are used with.
  template <int kN>
  __device__ __forceinline__ void start_from_delta(ptx::Fragment (&scores)[kM][kN],
                                                   int chunk) const {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      float2 d{0, 0};
      if constexpr (!kAnyTerms) d = pair_at(kTileQ + chunk + n * 8);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        scores[m][n][0] = scores[m][n][2] = -d.x;
        scores[m][n][1] = scores[m][n][3] = -d.y;
      }
    }
  }

  template <int kN>
  static __device__ __forceinline__ bool any_nonfinite(const ptx::Fragment (&a)[kM][kN],
                                                       const ptx::Fragment (&b)[kM][kN]) {
    float sum = 0;  // of zeros, or NaN
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int x = 0; x < 4; ++x) sum = fmaf(a[m][n][x], 0.0f, fmaf(b[m][n][x], 0.0f, sum));
      }
    }
    return __any_sync(0xffffffffu, sum != 0);
  }

  // Whether the rows of a chunk are finite, as lse and delta tell: lse2 is +inf where a row that is
  // sees nothing.
  __device__ __forceinline__ bool finite_rows(int chunk) const {
    const float lse2 = stats_[chunk + lane()], delta = stats_[kTileQ + chunk + lane()];
    return __all_sync(0xffffffffu, lse2 > -kInfinity && delta * 0.0f == 0);
  }

  // From products q . k and dout . v to weights and gradients of scores: keys from `first_key` of
  // the block on, rows from `chunk` of the rung on. `dirty`: some of these are not finite.
  // `hidden`: a bit for every score that a mask hides, as KeyTerms leaves them.
  template <bool kMasked, int kN>
  __device__ __forceinline__ void weigh(ptx::Fragment (&weights)[kM][kN],
                                        ptx::Fragment (&scores)[kM][kN], const Rung& rung,
                                        int first_key, int chunk, bool dirty,
                                        uint32_t hidden) const {
    const Problem& p = a_.p;
    const auto weigh_by = [&](auto of_row) {
      weigh_each<kMasked>(weights, scores, first_key, chunk, dirty, hidden, of_row);
    };
    if constexpr (kAnyTerms) {
      weigh_by([&](int row, RowStats stats) {
        // A mask is among the terms: what it hides stays zero, all else becomes NaN.
        if (dirty && bad_dout(stats)) stats.lse2 = stats.delta;
        const Row which = rung.span(kTileQ).of(place_.s, row);
        const int in_group = which.head < p.group ? which.head : 0;  // past the last: any
        const int head = place_.head_kv * p.group + in_group;
        const TermRow terms = term_row<T>(p, place_.s, place_.b, head, which.i);
        return [=, this](int first, int ahead, float raw, float dp) {
          const int key = first + ahead;
          float keep = 1;
          if (a_.p.drop_threshold != 0) {
            const float2 two = keep_two(a_.p, place_.b * a_.p.head_q + head, which.i, key & ~1);
            keep = key % 2 == 0 ? two.x : two.y;
          }
          // Keys past the last lie outside the tensors of terms; there is a last one, or no rung
          // would be climbed. A branch at each took a fourteenth of the pass.
          const int inside = min(key, place_.s.kv_len - 1);
          return gradient_of<T>(a_.p, terms, inside, raw, dp, stats, keep);
        };
      });
    } else if constexpr (kTerms == Terms::kComputed) {
      if (p.alibi != nullptr) {
        weigh_by([&](int row, RowStats stats) {
          const float2 line = reinterpret_cast<const float2*>(stats_ + 4 * kTileQ)[row];
          return [=, this](int first, int ahead, float raw, float dp) {
            const float distance = line.y - static_cast<float>(first) - static_cast<float>(ahead);
            const float start = fmaf(line.x, fabsf(distance), -stats.lse2);
            return gradient_at(fmaf(raw, a_.p.scale * kLog2e, start), dp);
          };
        });
        return;
      }
      const auto capped = [&](auto tanh_of) {
        weigh_by([=, this](int, RowStats stats) {
          return [=, this](int, int, float raw, float dp) {
            const float tanh = tanh_of(raw);
            Gradient g = gradient_at(fmaf(tanh, a_.p.softcap * kLog2e, -stats.lse2), dp);
            g.score *= fmaf(-tanh, tanh, 1.0f);
            return g;
          };
        });
      };
      if (to_quarters(weights)) {
        capped([](float x) { return tanh_of_quarter_series(x) * x; });
      } else {
        capped([](float x) { return tanh_by_exp(0.25f * x); });
      }
    } else {
      weigh_by([&](int, RowStats stats) {
        return [=, this](int, int, float raw, float dp) {
          return plain_gradient_of(a_.p, raw, dp, stats.lse2);
        };
      });
    }
  }

 private:
  static __device__ __forceinline__ int lane() {
    return is_one_term(kTerms) ? lane_anew() : static_cast<int>(threadIdx.x % 32);
  }

  static __device__ __forceinline__ bool bad_dout(RowStats stats) {
    return __float_as_uint(stats.delta) == kBadDout;
  }

  // of_row(row, stats) gives what takes (first, ahead, raw, dp) to a Gradient: `first` is a lane's
  // first key, and `ahead` of it, a constant, lies the one that is meant.
  template <bool kMasked, int kN, typename OfRow>
  __device__ __forceinline__ void weigh_each(ptx::Fragment (&weights)[kM][kN],
                                             ptx::Fragment (&scores)[kM][kN], int first_key,
                                             int chunk, bool dirty, uint32_t hidden,
                                             OfRow of_row) const {
    constexpr tile::RowOrder kOrder = kKeyOrder<kTerms>;
    const int2* const sights = reinterpret_cast<const int2*>(stats_ + 2 * kTileQ);
    const int prefix = min(a_.p.prefix, place_.s.kv_len);
    const int first = place_.key_begin + first_key + tile::row_in_order<kOrder>(lane() / 4);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const int pair = chunk + n * 8 + lane() % 4 * 2;
      const float2 lse2 = pair_at(chunk + n * 8), delta = pair_at(kTileQ + chunk + n * 8);
#pragma unroll
      for (int y = 0; y < 2; ++y) {
        const RowStats stats = y == 0 ? RowStats{lse2.x, delta.x} : RowStats{lse2.y, delta.y};
        Sight sight{};
        if constexpr (kMasked) {
          const int2 range = sights[pair + y];  // ends at -1: no row
          sight = {range.x, range.y, range.y < 0 ? 0 : prefix};
        }
        const auto gradient = of_row(pair + y, stats);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int ahead = tile::row_in_order<kOrder>(m * 16 + half * 8);
            float& w = weights[m][n][2 * half + y];
            float& ds = scores[m][n][2 * half + y];
            bool seen = !kMasked || sight.sees(first + ahead);
            if constexpr (kMasked && kTerms == Terms::kMask) {
              seen &= (hidden & KeyTerms<T, kTerms, kN>::bit(n, y, 2 * m + half)) == 0;
            }
            const Gradient g = gradient(first, ahead, w, ds);
            // Rows of dout that are not finite are left out of the products: delta tells of them.
            const bool bad = !kAnyTerms && dirty && bad_dout(stats);
            w = seen ? (bad ? stats.delta : g.weight) : 0.0f;
            ds = seen ? g.score : 0.0f;
          }
        }
      }
    }
  }

  // Products as quarters of softcap's bound. Whether all of the warp's are below half of it, as
  // most are: two special functions more for each would be waited for.
  template <int kN>
  __device__ __forceinline__ bool to_quarters(ptx::Fragment (&products)[kM][kN]) const {
    const float unit = 4.0f * a_.p.scale_of_cap;
    uint32_t bits = 0;
    tile::map(products, [&](float x) {
      bits |= __float_as_uint(x * unit);
      return x * unit;
    });
    // Of 2 and more, and of what is not finite, the top bit of the exponent is set.
    return __all_sync(0xffffffffu, (bits & 0x40000000u) == 0);
  }

  // This lane's pair of the eight words from `at` on.
  __device__ __forceinline__ float2 pair_at(int at) const {
    return *reinterpret_cast<const float2*>(stats_ + at + lane() % 4 * 2);
  }

  const BackwardArguments& a_;
  const RungPlace& place_;
  const float* const stats_;
};

}  // namespace fovea::cuda
