// A bias or a boolean mask of a block of keys: what the products q . k begin at. Where it may be
// read in vectors it is asked for before the products dout . v, which take the time it takes.
//
// Keys lie in the tiles in an order (tile::RowOrder::kRunsOfFour) in which the rows of a lane's
// fragments are four neighbouring keys: one vector of every query row.
#pragma once

#include "backend/cuda/portable/backward/config.h"
#include "backend/cuda/portable/terms.cuh"
#include "prim/cuda/ptx/ld_global.cuh"
#include "prim/cuda/ptx/mma.cuh"
#include "prim/cuda/ptx/registers.cuh"
#include "prim/cuda/ptx/st_global.cuh"
#include "prim/cuda/tile/shared_tile.cuh"

namespace fovea::cuda {

template <Terms kTerms>
inline constexpr bool kReadsTerm = kTerms == Terms::kBias || kTerms == Terms::kMask;
template <Terms kTerms>
inline constexpr tile::RowOrder kKeyOrder =
    kReadsTerm<kTerms> ? tile::RowOrder::kRunsOfFour : tile::RowOrder::kPlain;

// Of a warp, worked out anew: for kernels that have no register to keep it in.
__device__ __forceinline__ int lane_anew() {
  return static_cast<int>(ptx::renewed(threadIdx.x) % 32);
}

// Where row (head_q, i) of the term's tensor begins.
template <Terms kTerms>
__device__ __forceinline__ uint64_t term_begin(const Problem& p, int b, int head_q, int i) {
  const Broadcast& t = kTerms == Terms::kBias ? p.bias : p.bool_mask;
  const int bytes = kTerms == Terms::kMask ? 1 : p.bias_is_f32 ? 4 : 2;
  const int64_t at = b * t.batch + head_q * t.head + int64_t{i} * t.q;
  return reinterpret_cast<uint64_t>(t.data) + static_cast<uint64_t>(at * bytes);
}

// Of 32 keys and 8 kN rows.
template <typename T, Terms kTerms, int kN>
class KeyTerms {
  static constexpr bool kBias = kTerms == Terms::kBias;
  static constexpr int kBytes = kBias ? 2 : 1;  // of an element that is read in vectors
  static constexpr uint32_t kVisible = 0x80808080u;

 public:
  static constexpr int kKeys = 32;
  using Scores = ptx::Fragment[2][kN];

  // `rows`: in shared memory, where the rows begin in their tensor.
  __device__ __forceinline__ KeyTerms(const Problem& p, uint32_t rows) : p_(p), rows_(rows) {}

  // Asks for the term of keys key .., which all exist.
  __device__ __forceinline__ void fetch(int key) {
    const uint32_t at = (key + lane() / 4 * 4) * kBytes;
    each_row([&](int n, int y, uint64_t row) {
      if constexpr (kBias) {
        ptx::load_8(words_[n][y][0], words_[n][y][1], row + at);
      } else {
        ptx::load_4(words_[n][y][0], row + at);
      }
    });
  }

  // What has been asked for as what scores begin at.
  __device__ __forceinline__ void start(Scores& scores) const {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int y = 0; y < 2; ++y) {
        if constexpr (kBias) {
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            const float2 two = ptx::unpack<T>(words_[n][y][m]);
            scores[m][n][y] = two.x * p_.inverse_scale;
            scores[m][n][2 + y] = two.y * p_.inverse_scale;
          }
        } else {
          // The top bit of every byte that is not zero, then of those that are.
          const uint32_t bytes = words_[n][y][0];
          const uint32_t hidden = ~(((bytes & ~kVisible) + ~kVisible) | bytes) & kVisible;
#pragma unroll
          for (int x = 0; x < 4; ++x) {
            // 0x80 as the third byte and its sign as the fourth: -inf; 0 stays 0.
            uint32_t bits;
            asm("prmt.b32 %0, %1, 0, %2;"
                : "=r"(bits)
                : "r"(hidden), "r"(0x8044 | x << 12 | x << 8));
            scores[x / 2][n][x % 2 * 2 + y] = __uint_as_float(bits);
          }
        }
      }
    }
  }

  // The same one by one, of keys up to the last; a mask leaves a bit for every score that it hides,
  // for the product may be anything there.
  __device__ __forceinline__ uint32_t start_each(Scores& scores, int key, int kv_len) const {
    uint32_t hidden = 0;
    const int first = key + lane() / 4 * 4;
    each_row([&](int n, int y, uint64_t row) {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int at = min(first + x, kv_len - 1);
        float& score = scores[x / 2][n][x % 2 * 2 + y];
        if constexpr (kBias) {
          score = (p_.bias_is_f32 ? reinterpret_cast<const float*>(row)[at]
                                  : ptx::to_float(reinterpret_cast<const T*>(row)[at])) *
                  p_.inverse_scale;
        } else {
          score = 0;
          if (reinterpret_cast<const uint8_t*>(row)[at] == 0) hidden |= bit(n, y, x);
        }
      }
    });
    return hidden;
  }
  // A bit of the x-th of a lane's keys.
  static __device__ __forceinline__ constexpr uint32_t bit(int n, int y, int x) {
    return 1u << (n * 8 + y * 4 + x);
  }

  // Gradients of scores, which those of a bias are, to where it lies but `shift` bytes on.
  __device__ __forceinline__ void store(const Scores& scores, int key, int64_t shift) const {
    const int64_t at = shift + (key + lane() / 4 * 4) * kBytes;
    each_row([&](int n, int y, uint64_t row) {
      ptx::store_8(row + at, ptx::pack<T>(scores[0][n][y], scores[0][n][2 + y]),
                   ptx::pack<T>(scores[1][n][y], scores[1][n][2 + y]));
    });
  }
  // The same of keys up to the last and of the first `rows` rows.
  __device__ __forceinline__ void store_each(const Scores& scores, int key, int kv_len, int rows,
                                             int64_t shift) const {
    const int first = key + lane() / 4 * 4, column = lane() % 4 * 2;
    each_row([&](int n, int y, uint64_t row) {
      T* const to = reinterpret_cast<T*>(row + shift) + first;
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        if (n * 8 + column + y >= rows || first + x >= kv_len) continue;
        to[x] = ptx::from_float<T>(scores[x / 2][n][x % 2 * 2 + y]);
      }
    });
  }

 private:
  static __device__ __forceinline__ int lane() { return lane_anew(); }

  // body(n, y, row): where the row of column y of fragments [.][n] begins.
  template <typename Body>
  __device__ __forceinline__ void each_row(Body body) const {
    const uint32_t rows = rows_ + lane() % 4 * 16;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      uint64_t row[2];
      asm volatile("ld.shared.v2.u64 {%0, %1}, [%2];"
                   : "=l"(row[0]), "=l"(row[1])
                   : "r"(rows + n * 64));
#pragma unroll
      for (int y = 0; y < 2; ++y) body(n, y, row[y]);
    }
  }

  const Problem& p_;
  const uint32_t rows_;
  uint32_t words_[kN][2][kBias ? 2 : 1];
};

}  // namespace fovea::cuda
