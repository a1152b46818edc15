// The rows of a bias or a boolean mask that a block's rows read: where each begins in its tensor,
// in shared memory, for the sums leave no registers to keep it in.
#pragma once

#include "backend/cuda/portable/forward/place.cuh"
#include "backend/cuda/portable/terms.cuh"
#include "prim/cuda/tile/products.cuh"

namespace fovea::cuda {

template <int kM>
class TermRows {
 protected:
  static constexpr int kRows = 2 * kM;  // of a lane

 public:
  // Bytes of shared memory for each of the block's rows.
  static constexpr int kRowBytes = 8;

  __device__ __forceinline__ TermRows(const Problem& p, const Place& place, uint32_t shared)
      : p_(p), place_(place), begins_(shared) {}

 protected:
  // Finds the warp's rows in a tensor of elements of `bytes`.
  __device__ __forceinline__ void find_rows(const Broadcast& t, int bytes) {
    if (lane() >= 16 * kM) return;
    const int in_tile = warp() * 16 * kM + lane();
    const Row row = row_at(in_tile);
    const int64_t at =
        place_.b * t.batch + (place_.head_kv * p_.group + row.head) * t.head + row.i * t.q;
    const auto begin = reinterpret_cast<uint64_t>(t.data) + static_cast<uint64_t>(at * bytes);
    asm volatile("st.shared.u64 [%0], %1;" ::"r"(begins_ + in_tile * 8), "l"(begin) : "memory");
  }

  // key_at(n): the key of the lane's first column in fragment n; the other is the next.
  template <int kN, typename KeyAt>
  __device__ __forceinline__ void hide_unseen(ptx::Fragment (&scores)[kM][kN], KeyAt key_at) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Sight sight = sight_of(p_, place_.s, row_at(first_row() + r * 8).i);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const int key = key_at(n);
        if (!sight.sees(key)) scores[r / 2][n][r % 2 * 2] = -kInfinity;
        if (!sight.sees(key + 1)) scores[r / 2][n][r % 2 * 2 + 1] = -kInfinity;
      }
    }
  }

  // Where this lane's rows begin.
  struct Begins {
    __device__ __forceinline__ explicit Begins(const TermRows& terms) {
      const uint32_t at = terms.begins_ + first_row() * 8;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        asm volatile("ld.shared.u64 %0, [%1];" : "=l"(row[r]) : "r"(at + r * 8 * 8));
      }
    }
    uint64_t row[kRows];
  };

  // Terms of any alignment and type, up to the last key: term_at(row, key) of each. Rare: a
  // fragment at a time, entering at the end, so that it takes few registers.
  template <int kN, typename KeyAt, typename TermAt>
  __device__ __forceinline__ void start_each(ptx::Fragment (&scores)[kM][kN], KeyAt key_at,
                                             TermAt term_at) const {
    tile::clear(scores);  // or the scores of every other chunk would be kept for this one
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
          const int key = min(key_at(at) + e, place_.s.kv_len - 1);
          scores[r / 2][kN - 1][r % 2 * 2 + e] = term_at(row, key);
        }
      }
    }
  }

  // Rows past the last take the place of the first.
  __device__ __forceinline__ Row row_at(int in_tile) const {
    return place_.span.of(place_.s, in_tile < place_.rows ? in_tile : 0);
  }

  // Worked out wherever it is asked for: there is no register to keep it in.
  static __device__ __forceinline__ int lane() {
    uint32_t thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    return static_cast<int>(thread % 32);
  }
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
  // The lane's first row in the block's tile; the others follow 8 apart.
  static __device__ __forceinline__ int first_row() { return warp() * 16 * kM + lane() / 4; }

  const Problem& p_;
  const Place& place_;

 private:
  const uint32_t begins_;
};

}  // namespace fovea::cuda
