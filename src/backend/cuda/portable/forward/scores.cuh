// What happens to the scores of a warp's rows and a chunk of keys between the products: terms,
// masks and dropout.
#pragma once

#include "backend/cuda/portable/terms.cuh"
#include "prim/cuda/tile/products.cuh"

namespace fovea::cuda {

template <typename T, int kM, int kSharing>
class ScoreRows {
 public:
  __device__ __forceinline__ ScoreRows(const Problem& p, const Place& place)
      : p_(p), place_(place) {}

  // Calls body(row, m, x) for the lane's rows: x and x + 1 are its columns in fragments [m].
  template <typename Body>
  __device__ __forceinline__ void each_row(Body body) const {
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r)
      body(place_.span.of(place_.s, row_in_tile<kM, kSharing>(r)), r / 2, r % 2 * 2);
  }

  template <int kN>
  __device__ __forceinline__ void hide_unseen(ptx::Fragment (&scores)[kM][kN], int first) const {
    static_assert(kN <= 4);
    each_row([&](Row row, int m, int x) {
      const uint32_t seen = seen_keys(sight_of(p_, place_.s, row.i), first) >> (lane() % 4 * 2);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        if ((seen >> (8 * n) & 1) == 0) scores[m][n][x] = -kInfinity;
        if ((seen >> (8 * n) & 2) == 0) scores[m][n][x + 1] = -kInfinity;
      }
    });
  }

  // From products to logits. What a problem lacks costs a branch a chunk, not one an element.
  template <int kN>
  __device__ __forceinline__ void apply_terms(ptx::Fragment (&scores)[kM][kN], int first) const {
    const Problem& p = p_;
    const bool inside = first + kN * 8 <= place_.s.kv_len;
    if (p.softcap > 0) {
      const float inverse = p.scale / p.softcap;
      tile::map(scores, [&](float x) { return tanh_for<T>(x * inverse) * p.softcap; });
    } else {
      tile::map(scores, [&](float x) { return x * p.scale; });
    }
    if (p.bias.data != nullptr) {
      each_row([&](Row row, int m, int x) {
        const TermRow terms = terms_of(row);
        if (inside && p.bias_pairs) {
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            const float2 two = bias_pair<T>(p, terms, first + n * 8 + lane() % 4 * 2);
            scores[m][n][x] += two.x;
            scores[m][n][x + 1] += two.y;
          }
        } else {
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            const int key = first + n * 8 + lane() % 4 * 2, last = place_.s.kv_len - 1;
            scores[m][n][x] += bias_at<T>(p, terms, min(key, last));
            scores[m][n][x + 1] += bias_at<T>(p, terms, min(key + 1, last));
            one_at_a_time();
          }
        }
      });
    }
    if (p.alibi != nullptr) {
      each_row([&](Row row, int m, int x) {
        const TermRow terms = terms_of(row);
        const float distance = static_cast<float>(terms.position - first - lane() % 4 * 2);
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          scores[m][n][x] -= terms.slope * fabsf(distance - static_cast<float>(n * 8));
          scores[m][n][x + 1] -= terms.slope * fabsf(distance - static_cast<float>(n * 8 + 1));
        }
      });
    }
    if (p.bool_mask.data != nullptr) {
      each_row([&](Row row, int m, int x) {
        const TermRow terms = terms_of(row);
        const auto hide = [&](int n, bool first_hidden, bool second_hidden) {
          if (first_hidden) scores[m][n][x] = -kInfinity;
          if (second_hidden) scores[m][n][x + 1] = -kInfinity;
        };
        if (inside && p.mask_pairs) {
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            const uint32_t two =
                *reinterpret_cast<const uint16_t*>(terms.mask + first + n * 8 + lane() % 4 * 2);
            hide(n, (two & 0xff) == 0, two >> 8 == 0);
          }
        } else {
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            const int key = first + n * 8 + lane() % 4 * 2, last = place_.s.kv_len - 1;
            hide(n, terms.mask[min(key, last)] == 0, terms.mask[min(key + 1, last)] == 0);
            one_at_a_time();
          }
        }
      });
    }
  }

  // Keeps what seldom paths read from being fetched all at once, into registers that others need.
  static __device__ __forceinline__ void one_at_a_time() { asm volatile("" ::: "memory"); }

  // Of rows past the last too, which must not be asked for what lies outside the tensors.
  __device__ __forceinline__ TermRow terms_of(Row row) const {
    const bool real = row.head < p_.group && row.i < place_.s.q_len;
    const int head = place_.head_kv * p_.group + (real ? row.head : 0);
    return term_row<T>(p_, place_.s, place_.b, head, real ? row.i : 0);
  }

  template <int kN>
  __device__ __forceinline__ void drop(ptx::Fragment (&weights)[kM][kN], int first) const {
    each_row([&](Row row, int m, int x) {
      const int head = place_.b * p_.head_q + place_.head_kv * p_.group + row.head;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float2 keep = keep_two(p_, head, row.i, first + n * 8 + lane() % 4 * 2);
        weights[m][n][x] *= keep.x;
        weights[m][n][x + 1] *= keep.y;
      }
    });
  }

 private:
  // Of the 32 keys from `first` on, a bit each.
  static __device__ __forceinline__ uint32_t seen_keys(const Sight& sight, int first) {
    const uint32_t window =
        ptx::bits_below(sight.end - first) & ~ptx::bits_below(sight.begin - first);
    return window | ptx::bits_below(sight.prefix - first);
  }

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

  const Problem& p_;
  const Place& place_;
};

}  // namespace fovea::cuda
