// A bias or a boolean mask, read while the tensor cores work: scores do not begin at zero but at
// what is added to them, so that neither is left to do between the products.
//
// Keys lie in the tiles in an order (tile::runs_of_eight) in which a lane's columns are eight
// neighbouring keys: 16 bytes of a bias, or 8 of a mask, are what it needs of a row and 32 keys.
#pragma once

#include <type_traits>

#include "backend/cuda/portable/forward/place.cuh"
#include "backend/cuda/portable/terms.cuh"
#include "prim/cuda/ptx/ld_global.cuh"
#include "prim/cuda/tile/products.cuh"

namespace fovea::cuda {

template <typename T, int kM, int kKeys, bool kBias>
class ReadTerms {
  static constexpr int kRows = 2 * kM, kRuns = kKeys / 32, kN = kKeys / 8;
  static_assert(kM * kN % 8 == 0 && kKeys % 32 == 0);
  static constexpr bool kHalf = std::is_same_v<T, __half>;
  static constexpr uint32_t kVisible = 0x80808080u;

 public:
  using Scores = ptx::Fragment[kM][kN];

  // `rows`: 12 bytes of shared memory for each of the block's `count` rows.
  __device__ __forceinline__ ReadTerms(const Problem& p, const Place& place, uint32_t rows,
                                       int count)
      : p_(p), place_(place), begins_(rows), indices_(rows + count * 8) {}

  // Where the warp's rows begin in the tensor. Those past the last take the place of the first.
  __device__ __forceinline__ void find_rows() {
    if constexpr (kBias) diagonal_ = diagonal(p_.inverse_scale);
    if (lane() >= 16 * kM) return;
    const int in_tile = warp() * 16 * kM + lane();
    const Row row = place_.span.of(place_.s, in_tile < place_.rows ? in_tile : 0);
    const Broadcast& t = kBias ? p_.bias : p_.bool_mask;
    const int64_t at =
        place_.b * t.batch + (place_.head_kv * p_.group + row.head) * t.head + row.i * t.q;
    const int64_t bytes = !kBias ? 1 : p_.bias_is_f32 ? 4 : 2;
    const auto begin = reinterpret_cast<uint64_t>(t.data) + static_cast<uint64_t>(at * bytes);
    asm volatile("st.shared.u64 [%0], %1;" ::"r"(begins_ + in_tile * 8), "l"(begin) : "memory");
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(indices_ + in_tile * 4), "r"(row.i) : "memory");
  }

  // Whether the terms of kKeys keys may be read in vectors.
  __device__ __forceinline__ bool whole(int first) const {
    return p_.term_runs && first >= 0 && first + kKeys <= p_.kv_len;
  }
  __device__ __forceinline__ bool fetched(int first) const { return ahead_key_ == first; }
  __device__ __forceinline__ void fetch(int first) { fetch(Begins(*this), first); }

  // What the scores of keys first .. begin at, in units of the product. `now`: it has been fetched,
  // and what keys next .. begin at is fetched besides (unless negative).
  __device__ __forceinline__ void start(Scores& scores, int first, bool now, int next) {
    if (!now) {
      start_each(scores, first);
    } else if constexpr (kBias) {
      start_bias(scores);
    } else {
      start_mask(scores);
    }
    if (next >= 0) fetch(Begins(*this), next);
  }

  // The same of fetched terms, for rows that need no look: they have a reference or, with a mask,
  // see none of the keys.
  __device__ __forceinline__ void start_fetched(Scores& scores) const {
    if constexpr (kBias) {
      multiply_bias(scores);
    } else {
      start_mask(scores);
    }
  }
  // Fetches what keys next .. begin at, unless negative. A bias comes from afar: the branch keeps
  // the compiler from putting off its loads until registers are free. A mask is small, and likely
  // in a cache: without a next chunk this one's (first ..) is read again, to spare the branch.
  __device__ __forceinline__ void fetch_next(int first, int next) {
    if constexpr (kBias) {
      if (next >= 0) fetch(Begins(*this), next);
    } else {
      fetch(Begins(*this), next >= 0 ? next : first);
      ahead_key_ = next;
    }
  }

  // Of fetched terms: whether a mask hides every key from all of the warp's rows.
  __device__ __forceinline__ bool hides_all() const {
    if constexpr (kBias) return false;
    uint32_t bytes = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) bytes |= mask_bytes(r);
    return __all_sync(0xffffffffu, bytes == 0);
  }
  // Whether they may be the first to show a key to a row without a reference.
  __device__ __forceinline__ bool shows_first(const float (&reference)[kRows]) const {
    if constexpr (kBias) return true;
    bool first = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) first |= reference[r] == -kInfinity && mask_bytes(r) != 0;
    return __any_sync(0xffffffffu, first);
  }

  // A bit for every score that a mask hides, before the product.
  struct Hidden {
    uint32_t bits[kM * kN / 8] = {};
  };
  __device__ __forceinline__ Hidden masked(const Scores& scores) const {
    Hidden hidden;
    if constexpr (!kBias) {
#pragma unroll
      for (int i = 0; i < kM * kN * 4; ++i) {
        if (scores[i / 4 / kN][i / 4 % kN][i % 4] != 0) hidden.bits[i / 32] |= 1u << i % 32;
      }
    }
    return hidden;
  }
  // After it: -inf, whatever it was, for a key may hold NaN.
  __device__ __forceinline__ void hide(Scores& scores, const Hidden& hidden) const {
#pragma unroll
    for (int i = 0; i < kM * kN * 4; ++i) {
      if ((hidden.bits[i / 32] >> i % 32 & 1) != 0) {
        scores[i / 4 / kN][i / 4 % kN][i % 4] = -kInfinity;
      }
    }
  }

  __device__ __forceinline__ void hide_unseen(Scores& scores, int first) const {
    const uint32_t at = indices_ + first_row() * 4;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      int i;
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(i) : "r"(at + r * 8 * 4));
      const Sight sight = sight_of(p_, place_.s, i);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const int key = key_at(first, n);
        if (!sight.sees(key)) scores[r / 2][n][r % 2 * 2] = -kInfinity;
        if (!sight.sees(key + 1)) scores[r / 2][n][r % 2 * 2 + 1] = -kInfinity;
      }
    }
  }

 private:
  // Worked out wherever it is asked for: there is no register to keep it in.
  static __device__ __forceinline__ int lane() {
    uint32_t thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    return static_cast<int>(thread % 32);
  }
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }

  // Of the lane's first column in fragment n; the other is the next.
  static __device__ __forceinline__ int key_at(int first, int n) {
    return first + n / 4 * 32 + lane() % 4 * 8 + n % 4 * 2;
  }

  // The lane's first row in the block's tile; the others follow 8 apart.
  static __device__ __forceinline__ int first_row() { return warp() * 16 * kM + lane() / 4; }

  // Where this lane's rows begin.
  struct Begins {
    __device__ __forceinline__ explicit Begins(const ReadTerms& terms) {
      const uint32_t at = terms.begins_ + first_row() * 8;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        asm volatile("ld.shared.u64 %0, [%1];" : "=l"(row[r]) : "r"(at + r * 8 * 8));
      }
    }
    uint64_t row[kRows];
  };

  __device__ __forceinline__ void fetch(const Begins& begins, int first) {
    const uint32_t key = first + lane() % 4 * 8;
    ahead_key_ = first;
    if constexpr (kBias) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
          ptx::load_once_16(ahead_[r][run], begins.row[r] + 2 * key + run * 64);
        }
      }
    } else {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
          ptx::load_8(ahead_[r][run][0], ahead_[r][run][1], begins.row[r] + key + run * 32);
        }
      }
    }
  }

  // Of the lane's row r, or'ed: not zero if the fetched mask shows it one of the lane's keys.
  __device__ __forceinline__ uint32_t mask_bytes(int r) const {
    uint32_t bytes = 0;
#pragma unroll
    for (int run = 0; run < kRuns; ++run) bytes |= ahead_[r][run][0] | ahead_[r][run][1];
    return bytes;
  }

  __device__ __forceinline__ void start_bias(Scores& scores) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float2 two = ptx::unpack<T>(ahead_[r][n / 4][n % 4]);
        scores[r / 2][n][r % 2 * 2] = two.x * p_.inverse_scale;
        scores[r / 2][n][r % 2 * 2 + 1] = two.y * p_.inverse_scale;
      }
    }
  }

  // The same by tensor cores: fragments of the bias times a diagonal of 1 / scale, as one value of
  // T or, where that is not exact, the sum of two.
  __device__ __forceinline__ void multiply_bias(Scores& scores) const {
    constexpr uint32_t kLowBits = kHalf ? 0x1fff : 0xffff;  // that T does not keep
    tile::clear(scores);
    add_bias_by(diagonal_, scores);
    if ((__float_as_uint(p_.inverse_scale) & kLowBits) != 0) {
      const float high = ptx::to_float(ptx::from_float<T>(p_.inverse_scale));
      add_bias_by(diagonal(p_.inverse_scale - high), scores);
    }
  }
  // What this lane holds of one.
  static __device__ __forceinline__ uint32_t diagonal(float x) {
    const int row = lane() % 4 * 2, col = lane() / 4;
    return ptx::pack<T>(row == col ? x : 0.0f, row + 1 == col ? x : 0.0f);
  }
  __device__ __forceinline__ void add_bias_by(uint32_t diagonal, Scores& scores) const {
    // -inf would meet the zeros beside the diagonal. These (-65504, -2^100) hide as well from a row
    // that has a reference.
    constexpr uint32_t kLeast = kHalf ? 0xfbfffbff : 0xf180f180;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const uint32_t top = ptx::max_of_pairs<T>(ahead_[2 * m][n / 4][n % 4], kLeast);
        const uint32_t bottom = ptx::max_of_pairs<T>(ahead_[2 * m + 1][n / 4][n % 4], kLeast);
        ptx::mma_m16n8k8<T>(scores[m][n], top, bottom, diagonal);
      }
    }
  }

  __device__ __forceinline__ void start_mask(Scores& scores) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        // The top bit of every byte that is not zero, then of those that are.
        const uint32_t bytes = ahead_[r][n / 4][n % 4 / 2];
        const uint32_t hidden = ~(((bytes & ~kVisible) + ~kVisible) | bytes) & kVisible;
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          // 0x80 as the third byte and its sign as the fourth: -inf; 0 stays 0.
          uint32_t bits;
          asm("prmt.b32 %0, %1, 0, %2;" : "=r"(bits) : "r"(hidden), "r"(0x8044 | x << 12 | x << 8));
          scores[r / 2][n + x / 2][r % 2 * 2 + x % 2] = __uint_as_float(bits);
        }
      }
    }
  }

  // Any alignment and type, up to the last key. Rare: a fragment at a time, entering at the end, so
  // that it takes few registers.
  __device__ __forceinline__ void start_each(Scores& scores, int first) const {
#pragma unroll 1
    for (int at = 0; at < kN; ++at) {
      const Begins begins(*this);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const uint64_t row = begins.row[r];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
#pragma unroll
          for (int n = 0; n + 1 < kN; ++n) {
            scores[r / 2][n][r % 2 * 2 + e] = scores[r / 2][n + 1][r % 2 * 2 + e];
          }
          const int key = min(key_at(first, at) + e, place_.s.kv_len - 1);
          scores[r / 2][kN - 1][r % 2 * 2 + e] = term_at(row, key);
        }
      }
    }
  }
  __device__ __forceinline__ float term_at(uint64_t row, int key) const {
    if constexpr (!kBias) {
      return reinterpret_cast<const uint8_t*>(row)[key] == 0 ? -kInfinity : 0.0f;
    }
    const float bias = p_.bias_is_f32 ? reinterpret_cast<const float*>(row)[key]
                                      : ptx::to_float(reinterpret_cast<const T*>(row)[key]);
    return bias * p_.inverse_scale;
  }

  const Problem& p_;
  const Place& place_;
  const uint32_t begins_, indices_;
  uint32_t diagonal_;   // of 1 / scale, as T
  int ahead_key_ = -1;  // whose terms have been fetched
  uint32_t ahead_[kRows][kRuns][4];
};

}  // namespace fovea::cuda
