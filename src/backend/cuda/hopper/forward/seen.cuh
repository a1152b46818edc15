// Which keys the rows of a warpgroup see.
#pragma once

#include "backend/cuda/common/sequence.cuh"
#include "backend/cuda/hopper/forward/shared.cuh"
#include "prim/cuda/ptx/registers.cuh"

namespace fovea::cuda::hopper {

class RowsSeen {
 public:
  // Of 64 rows from `row` of the sequence on; rows past the last see what that one does.
  __device__ __forceinline__ RowsSeen(const Problem& p, const Work& work, int row)
      : p_(p), work_(work), row_(row) {
    all_begin_ = sight(row + kRowsOfWarpgroup - 1).begin;
    all_end_ = sight(row).end;
  }

  __device__ __forceinline__ bool all(int key, int count) const {
    return key >= all_begin_ && key + count <= all_end_;
  }
  // Whether each row sees at least one of them.
  __device__ __forceinline__ bool all_see_some(int key, int count) const {
    return key + count > all_begin_ && key < all_end_;
  }

  // The end of the keys that any row sees.
  __device__ __forceinline__ int any_end() const { return sight(row_ + kRowsOfWarpgroup - 1).end; }

  // Makes the scores of keys that a row does not see -inf, whatever they were.
  template <int kCount>
  __device__ __forceinline__ void hide(float (&scores)[kCount], int key, int count) const {
    if (all(key, count)) return;
    const int at = ptx::renewed(threadIdx.x);  // what masks need is not kept from block to block
    const int row = row_ + at % kWarpgroup / 32 * 16 + at % 32 / 4;
    const int first = key + at % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Sight sees = sight(row + 8 * half);
      const auto keys = static_cast<uint32_t>(sees.end - sees.begin);
      const int from = first - sees.begin;
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          if (static_cast<uint32_t>(from + 8 * j + x) >= keys) {
            scores[4 * j + 2 * half + x] = -__builtin_huge_valf();
          }
        }
      }
    }
  }

  __device__ __forceinline__ bool sees(int row, int key) const {
    return sight(row_ + row).sees(key);
  }

 private:
  __device__ __forceinline__ Sight sight(int row) const {
    Sequence s{work_.q_len, work_.kv_len, 0, 0, 0};
    return sight_of(p_, s, min(row, work_.q_len - 1));
  }

  const Problem& p_;
  const Work& work_;
  const int row_;
  int all_begin_, all_end_;  // keys that every row sees
};

}  // namespace fovea::cuda::hopper
