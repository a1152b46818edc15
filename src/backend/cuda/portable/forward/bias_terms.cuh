// A bias, which scores begin at, so that nothing is left to do between the products. It comes
// through shared memory: each warp asks for that of its own rows and the next chunk of keys as soon
// as it holds that of the present one, which takes neither registers nor other warps.
//
// Scores are in units of the product, which a bias is divided by the scale for; or in those of the
// logits, where the scale is a power of two and Q, in registers, has been multiplied by it.
#pragma once

#include <type_traits>

#include "backend/cuda/portable/forward/term_rows.cuh"
#include "prim/cuda/tile/products.cuh"

namespace fovea::cuda {

// How the bias of rows that have a reference becomes what scores begin at: as it is; by tensor
// cores, as products with a diagonal of 1 / scale; or, where that is not a value of T, of two
// values that add up to it.
enum class Units { kLogits, kProducts, kSplitProducts };

// kWaited: a chunk is a whole tile of keys, and has been waited for with them. kScalesQ: Q is in
// registers.
template <typename T, int kM, int kKeys, bool kWaited, bool kScalesQ>
class BiasTerms : public TermRows<kM> {
  using Base = TermRows<kM>;
  using Base::kRows, Base::lane, Base::warp, Base::p_;
  using typename Base::Begins;
  static constexpr int kN = kKeys / 8;
  static constexpr bool kHalf = std::is_same_v<T, __half>;
  using Tile = tile::SharedTile<T, 16 * kM, 64>;  // of a warp
  static_assert(kKeys % 16 == 0 && kKeys <= Tile::kCols);

 public:
  using Scores = ptx::Fragment[kM][kN];

  // `shared`: begins on 128 bytes, and has Tile's bytes for each warp and kRowBytes for each row.
  __device__ __forceinline__ BiasTerms(const Problem& p, const Place& place, uint32_t shared,
                                       int count)
      : Base(p, place, shared + count * Tile::row_bytes(0)),
        tile_(shared + warp() * Tile::kBytes) {}

  __device__ __forceinline__ void find_rows() {
    const float high = ptx::to_float(ptx::from_float<T>(p_.inverse_scale));
    diagonal_ = diagonal(high);
    rest_ = diagonal(p_.inverse_scale - high);
    Base::find_rows(p_.bias, p_.bias_is_f32 ? 4 : 2);
  }

  // Whether the bias may be asked for in vectors; and that of kKeys keys in whole ones.
  __device__ __forceinline__ bool fetchable(int) const { return p_.term_runs; }
  __device__ __forceinline__ bool whole(int first) const {
    return p_.term_runs && first >= 0 && first + kKeys <= p_.kv_len;
  }
  __device__ __forceinline__ bool fetched(int first) const { return ahead_key_ == first; }

  // Of keys up to the last: what is past it becomes zeros. Nothing else is on its way, for what was
  // asked for has been taken or, at the start of a tile, waited for.
  __device__ __forceinline__ void fetch(int first) {
    __syncwarp();
    const int key = first + lane() % 4 * 8;
    each_piece([&](uint32_t to, uint64_t row, int run) {
      const int left = clamp_to(p_.kv_len - key - run * 32, 0, 8);
      ptx::cp_async_16(to, reinterpret_cast<const void*>(left > 0 ? row + 2 * key + run * 64 : row),
                       2 * left);
    });
    ptx::cp_async_commit();
    ahead_key_ = first;
  }

  // What the scores of keys first .. begin at, exactly so. `now`: it has been fetched; what keys
  // next .. begin at is fetched besides (unless negative).
  __device__ __forceinline__ void start(Scores& scores, int first, bool now, int next) {
    if (now) {
      wait();
      start_times(unit(), scores);
    } else {
      this->start_each(
          scores, [&](int n) { return key_at(first, n); },
          [&](uint64_t row, int key) {
            const float bias = p_.bias_is_f32 ? reinterpret_cast<const float*>(row)[key]
                                              : ptx::to_float(reinterpret_cast<const T*>(row)[key]);
            return bias * unit();
          });
    }
    if (next >= 0) fetch(next);
  }

  // Calls body(units), a constant.
  template <typename Body>
  __device__ __forceinline__ void with_units(Body body) const {
    constexpr Units kAtOnce = kScalesQ ? Units::kLogits : Units::kProducts;
    constexpr uint32_t kLowBits = kHalf ? 0x1fff : 0xffff;  // that T does not keep
    if (kScalesQ ? scales_q() : (__float_as_uint(p_.inverse_scale) & kLowBits) == 0) {
      body(std::integral_constant<Units, kAtOnce>());
    } else {
      body(std::integral_constant<Units, Units::kSplitProducts>());
    }
  }
  // Whether Q is to be multiplied by the scale, which changes none of its values but such as are
  // nearly zero.
  __device__ __forceinline__ bool scales_q() const {
    constexpr float kLeast = 0x1p-6f;
    return kScalesQ && (__float_as_uint(p_.scale) & 0x7fffff) == 0 && p_.scale >= kLeast &&
           p_.scale <= 1;
  }
  template <int kPieces>
  __device__ __forceinline__ void scale_q(uint32_t (&q)[kM][kPieces][4]) const {
    const uint32_t scale = ptx::pack<T>(p_.scale, p_.scale);
#pragma unroll
    for (int x = 0; x < kM * kPieces * 4; ++x) {
      uint32_t& pair = q[x / 4 / kPieces][x / 4 % kPieces][x % 4];
      pair = ptx::multiply_pairs<T>(pair, scale);
    }
  }

  // The same of whole and fetched ones, for rows that have a reference.
  template <Units kUnits>
  __device__ __forceinline__ void start_fetched(Scores& scores) {
    if constexpr (!kWaited) wait();
    if constexpr (kUnits == Units::kLogits) {
      start_times(1, scores);
    } else {
      start_products<kUnits>(scores);
    }
  }
  // Asks for what keys next .. begin at, unless negative, once that of keys first .. is taken.
  __device__ __forceinline__ void fetch_next(int first, int next) {
    fetch_whole(next >= 0 ? next : first);  // again, to spare a branch
    ahead_key_ = next;
  }

  // A bias is added whatever the product is; it hides no key.
  struct Hidden {};
  __device__ __forceinline__ Hidden masked(const Scores&) const { return {}; }
  __device__ __forceinline__ void hide(Scores&, Hidden) const {}

  __device__ __forceinline__ void hide_unseen(Scores& scores, int first) const {
    Base::hide_unseen(scores, [&](int n) { return key_at(first, n); });
  }

 private:
  static __device__ __forceinline__ int key_at(int first, int n) {
    return first + n * 8 + lane() % 4 * 2;
  }

  // body(to, row, run): 8 keys of a row from 32 run on, four lanes a row.
  template <typename Body>
  __device__ __forceinline__ void each_piece(Body body) const {
    const Begins begins(*this);
    const int piece = lane() % 4;
    const uint32_t to = tile_ + Tile::offset(lane() / 4, piece);
#pragma unroll
    for (int run = 0; run * 32 < kKeys; ++run) {
      if (run * 32 + 32 > kKeys && piece >= kKeys % 32 / 8) break;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        body((to ^ run * 64) + r * 8 * Tile::row_bytes(0), begins.row[r], run);
      }
    }
  }
  __device__ __forceinline__ void fetch_whole(int first) {
    __syncwarp();
    const uint32_t at = 2 * (first + lane() % 4 * 8);
    each_piece([&](uint32_t to, uint64_t row, int run) {
      ptx::cp_async_16_of_line(to, reinterpret_cast<const void*>(row + at + run * 64));
    });
    ptx::cp_async_commit();
  }

  // Until what this warp has asked for is there.
  static __device__ __forceinline__ void wait() {
    ptx::cp_async_wait<0>();
    __syncwarp();
  }

  // body(m, n, bias): what has been fetched for fragments [m][n] and [m][n + 1], as the left
  // operands of two products.
  template <typename Body>
  __device__ __forceinline__ void each_pair_of_fragments(Body body) const {
    const auto at = Tile::Lane::rows_first();
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        uint32_t bias[4];
        ptx::ldmatrix_x4(bias, tile_ + at.at(16 * m, 8 * n));
        body(m, n, bias);
      }
    }
  }

  // Of what has been fetched.
  __device__ __forceinline__ void start_times(float unit, Scores& scores) const {
    each_pair_of_fragments([&](int m, int n, const uint32_t(&bias)[4]) {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const float2 two = ptx::unpack<T>(bias[x]);
        scores[m][n + x / 2][x % 2 * 2] = two.x * unit;
        scores[m][n + x / 2][x % 2 * 2 + 1] = two.y * unit;
      }
    });
  }
  template <Units kUnits>
  __device__ __forceinline__ void start_products(Scores& scores) const {
    // -inf would meet the zeros beside the diagonal. These (-65504, -2^100) hide as well from a row
    // that has a reference.
    constexpr uint32_t kLeast = kHalf ? 0xfbfffbff : 0xf180f180;
    tile::clear(scores);
    each_pair_of_fragments([&](int m, int n, uint32_t(&bias)[4]) {
#pragma unroll
      for (int x = 0; x < 4; ++x) bias[x] = ptx::max_of_pairs<T>(bias[x], kLeast);
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        ptx::Fragment& begin = scores[m][n + x];
        ptx::mma_m16n8k8<T>(begin, bias[2 * x], bias[2 * x + 1], diagonal_);
        if constexpr (kUnits == Units::kSplitProducts) {
          ptx::mma_m16n8k8<T>(begin, bias[2 * x], bias[2 * x + 1], rest_);
        }
      }
    });
  }

  // From logits to the units of scores.
  __device__ __forceinline__ float unit() const { return scales_q() ? 1.0f : p_.inverse_scale; }

  // What this lane holds of a diagonal.
  static __device__ __forceinline__ uint32_t diagonal(float x) {
    const int row = lane() % 4 * 2, col = lane() / 4;
    return ptx::pack<T>(row == col ? x : 0.0f, row + 1 == col ? x : 0.0f);
  }

  const uint32_t tile_;
  uint32_t diagonal_, rest_;  // of 1 / scale: a value of T, and what it is less than that
  int ahead_key_ = -1;        // whose bias has been fetched
};

}  // namespace fovea::cuda
