// What happens between the products of a block of keys: q . k and dout . v become weights and
// gradients of scores. Fragments have keys for rows and queries for columns.
#pragma once

#include "backend/cuda/portable/backward/element.cuh"
#include "backend/cuda/portable/backward/ladder.cuh"

namespace fovea::cuda {

template <typename T, int kM, int kTileQ, bool kAnyTerms>
class KeyElements {
 public:
  // `stats`: of a rung's rows, [lse2, delta, sight (two)][kTileQ].
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

  // From products q . k and dout . v to weights and gradients of scores: keys from `first_key` of
  // the block on, rows from `chunk` of the rung on. `dirty`: some of these are not finite.
  template <bool kMasked, int kN>
  __device__ __forceinline__ void weigh(ptx::Fragment (&weights)[kM][kN],
                                        ptx::Fragment (&scores)[kM][kN], const Rung& rung,
                                        int first_key, int chunk, bool dirty) const {
    const int2* const sights = reinterpret_cast<const int2*>(stats_ + 2 * kTileQ);
    const int prefix = min(a_.p.prefix, place_.s.kv_len);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const int pair = chunk + n * 8 + lane() % 4 * 2;
      const float2 lse2 = pair_at(chunk + n * 8), delta = pair_at(kTileQ + chunk + n * 8);
#pragma unroll
      for (int y = 0; y < 2; ++y) {
        const RowStats of_row = y == 0 ? RowStats{lse2.x, delta.x} : RowStats{lse2.y, delta.y};
        Sight sight{};
        if constexpr (kMasked) {
          const int2 range = sights[pair + y];  // ends at -1: no row
          sight = {range.x, range.y, range.y < 0 ? 0 : prefix};
        }
        Row which{};
        TermRow terms{};
        bool real = true;
        if constexpr (kAnyTerms) {
          which = rung.span(kTileQ).of(place_.s, pair + y);
          real = which.head < a_.p.group;
          const int head = place_.head_kv * a_.p.group + (real ? which.head : 0);
          terms = term_row<T>(a_.p, place_.s, place_.b, head, which.i);
        }
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int key = place_.key_begin + first_key + m * 16 + half * 8 + lane() / 4;
            float& w = weights[m][n][2 * half + y];
            float& ds = scores[m][n][2 * half + y];
            const bool seen = !kMasked || (real && sight.sees(key));
            float keep = 1;
            if (kAnyTerms && a_.p.drop_threshold != 0) {
              const float2 two =
                  keep_two(a_.p, place_.b * a_.p.head_q + place_.head_kv * a_.p.group + which.head,
                           which.i, key & ~1);
              keep = key % 2 == 0 ? two.x : two.y;
            }
            Gradient g;
            if constexpr (kAnyTerms) {
              // Keys past the last lie outside the tensors of terms; there is a last one, or no
              // rung would be climbed. A branch at each took a fourteenth of the pass.
              const int inside = min(key, place_.s.kv_len - 1);
              g = gradient_of<T>(a_.p, terms, inside, w, ds, of_row, keep);
            } else {
              g = plain_gradient_of(a_.p, w, ds, of_row.lse2);
            }
            // Rows of dout that are not finite are left out of the products: delta tells of them.
            const bool bad = dirty && __float_as_uint(of_row.delta) == kBadDout;
            w = seen ? (bad ? of_row.delta : g.weight) : 0.0f;
            ds = seen ? g.score : 0.0f;
          }
        }
      }
    }
  }

 private:
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

  // This lane's pair of the eight words from `at` on.
  __device__ __forceinline__ float2 pair_at(int at) const {
    return *reinterpret_cast<const float2*>(stats_ + at + lane() % 4 * 2);
  }

  const BackwardArguments& a_;
  const RungPlace& place_;
  const float* const stats_;
};

}  // namespace fovea::cuda
