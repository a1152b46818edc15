// A boolean mask, read while the tensor cores work: scores begin at zero or, where it hides, at
// -inf, so that nothing is left to do between the products.
//
// Keys lie in the tiles in an order (tile::RowOrder::kRunsOfEight) in which a lane's columns are
// eight neighbouring keys: 8 bytes of the mask are what it needs of a row and 32 keys.
#pragma once

#include "backend/cuda/portable/forward/term_rows.cuh"
#include "prim/cuda/ptx/ld_global.cuh"

namespace fovea::cuda {

template <int kM, int kKeys>
class MaskTerms : public TermRows<kM> {
  using Base = TermRows<kM>;
  using Base::kRows, Base::lane, Base::p_;
  using typename Base::Begins;
  static constexpr int kRuns = kKeys / 32, kN = kKeys / 8;
  static_assert(kM * kN % 8 == 0 && kKeys % 32 == 0);
  static constexpr uint32_t kVisible = 0x80808080u;

 public:
  using Scores = ptx::Fragment[kM][kN];

  // `shared`: kRowBytes for each of the block's `count` rows.
  __device__ __forceinline__ MaskTerms(const Problem& p, const Place& place, uint32_t shared, int)
      : Base(p, place, shared) {}

  __device__ __forceinline__ void find_rows() { Base::find_rows(p_.bool_mask, 1); }

  // Whether the terms of kKeys keys may be read in vectors.
  __device__ __forceinline__ bool whole(int first) const {
    return p_.term_runs && first >= 0 && first + kKeys <= p_.kv_len;
  }
  __device__ __forceinline__ bool fetchable(int first) const { return whole(first); }
  __device__ __forceinline__ bool fetched(int first) const { return ahead_key_ == first; }
  __device__ __forceinline__ void fetch(int first) {
    const Begins begins(*this);
    const uint32_t key = first + lane() % 4 * 8;
    ahead_key_ = first;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        ptx::load_8(ahead_[r][run][0], ahead_[r][run][1], begins.row[r] + key + run * 32);
      }
    }
  }

  // What the scores of keys first .. begin at. `now`: it has been fetched; what keys next .. begin
  // at is fetched besides (unless negative).
  __device__ __forceinline__ void start(Scores& scores, int first, bool now, int next) {
    if (!now) {
      this->start_each(
          scores, [&](int n) { return key_at(first, n); },
          [](uint64_t row, int key) {
            return reinterpret_cast<const uint8_t*>(row)[key] == 0 ? -kInfinity : 0.0f;
          });
    } else {
      start_fetched(scores);
    }
    if (next >= 0) fetch(next);
  }

  __device__ __forceinline__ void start_fetched(Scores& scores) const {
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

  // Fetches what keys next .. begin at, unless negative. A mask is small, and likely in a cache:
  // without a next chunk this one's (first ..) is read again, to spare a branch.
  __device__ __forceinline__ void fetch_next(int first, int next) {
    fetch(next >= 0 ? next : first);
    ahead_key_ = next;
  }

  // Of fetched terms: whether every key is hidden from all of the warp's rows.
  __device__ __forceinline__ bool hides_all() const {
    uint32_t bytes = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) bytes |= bytes_of(r);
    return __all_sync(0xffffffffu, bytes == 0);
  }
  // Whether they may be the first to show a key to a row without a reference.
  __device__ __forceinline__ bool shows_first(const float (&reference)[kRows]) const {
    bool first = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) first |= reference[r] == -kInfinity && bytes_of(r) != 0;
    return __any_sync(0xffffffffu, first);
  }

  // A bit for every score that is hidden, before the product.
  struct Hidden {
    uint32_t bits[kM * kN / 8] = {};
  };
  __device__ __forceinline__ Hidden masked(const Scores& scores) const {
    Hidden hidden;
#pragma unroll
    for (int i = 0; i < kM * kN * 4; ++i) {
      if (scores[i / 4 / kN][i / 4 % kN][i % 4] != 0) hidden.bits[i / 32] |= 1u << i % 32;
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
    Base::hide_unseen(scores, [&](int n) { return key_at(first, n); });
  }

 private:
  static __device__ __forceinline__ int key_at(int first, int n) {
    return first + n / 4 * 32 + lane() % 4 * 8 + n % 4 * 2;
  }

  // Of the lane's row r, or'ed: not zero if the fetched mask shows it one of the lane's keys.
  __device__ __forceinline__ uint32_t bytes_of(int r) const {
    uint32_t bytes = 0;
#pragma unroll
    for (int run = 0; run < kRuns; ++run) bytes |= ahead_[r][run][0] | ahead_[r][run][1];
    return bytes;
  }

  int ahead_key_ = -1;  // whose terms have been fetched
  uint32_t ahead_[kRows][kRuns][2];
};

}  // namespace fovea::cuda
