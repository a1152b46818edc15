// What a block of the forward pass leaves behind: outputs and lse, or the parts of them for a
// merge.
#pragma once

#include "backend/cuda/portable/forward/config.h"
#include "backend/cuda/portable/forward/softmax.cuh"
#include "backend/cuda/portable/loads.cuh"
#include "backend/cuda/portable/terms.cuh"
#include "prim/cuda/ptx/st_global.cuh"
#include "prim/cuda/tile/products.cuh"

namespace fovea::cuda {

template <typename T>
__device__ __forceinline__ T* out_row(const ForwardArguments& a, const Place& place, int row) {
  const Row which = place.span.of(place.s, row);
  return rows_at<T>(a.out, place.s, place.s.q_row + which.i,
                    place.head_kv * a.p.group + which.head);
}

__device__ __forceinline__ void store_lse(const ForwardArguments& a, const Place& place, int row,
                                          float reference, float sum) {
  const Row which = place.span.of(place.s, row);
  const int head = place.head_kv * a.p.group + which.head;
  a.lse.data[place.s.batch_at * a.lse.batch + head * a.lse.head +
             (place.s.q_row + which.i) * a.lse.row] =
      sum == 0 ? -kInfinity : (reference + log2f(sum)) * kLn2;
}

// Eight 16-bit values, of which `count` exist.
template <typename T>
__device__ __forceinline__ void store_words(T* to, uint4 words, int count, bool vector) {
  if (vector) {
    *reinterpret_cast<uint4*>(to) = words;
    return;
  }
  const uint32_t w[4] = {words.x, words.y, words.z, words.w};
  for (int y = 0; y < 8 && y < count; ++y) {
    reinterpret_cast<uint16_t*>(to)[y] = static_cast<uint16_t>(w[y / 2] >> (y % 2 * 16));
  }
}

// Rows of partial results: [part][KV head][row of the group].
__device__ __forceinline__ int64_t partial_index(const ForwardArguments& a, const Place& place) {
  const int64_t all = static_cast<int64_t>(a.p.group) * a.p.q_len;
  const int64_t heads = int64_t{a.batch} * a.p.head_kv;
  return (blockIdx.y * heads + place.b * a.p.head_kv + place.head_kv) * all + place.row;
}
__device__ __forceinline__ float* partial_row(const ForwardArguments& a, const Place& place) {
  return a.parts.sums + partial_index(a, place) * a.p.dim_v;
}

template <typename Shape>
class ForwardEpilogue {
  using T = typename Shape::Element;
  static constexpr ForwardConfig kC = Shape::kConfig;
  static constexpr int kM = kC.m_tiles, kOut = kC.dim_v / 8, kTileQ = kC.tile_q();
  using TileOut = tile::SharedTile<T, kTileQ, kC.dim_v, true>;
  static constexpr int kChunks = TileOut::kChunks;
  using Sums = ptx::Fragment[kM][kOut];

 public:
  // `s_q`: shared memory that nobody reads any more, of the size of the tile of Q.
  __device__ __forceinline__ ForwardEpilogue(const ForwardArguments& a, const Place& place,
                                             uint32_t s_q, const RunningSoftmax<kM>& softmax,
                                             const Sums& out)
      : a_(a), place_(place), s_q_(s_q), softmax_(softmax), out_(out) {}

  __device__ __forceinline__ void store() {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int r = 0; r < 2 * kM; ++r) {
        const int row = row_in_tile<kM>(r);
        const float sum = softmax_.sum[r], inverse = sum == 0 ? 0.0f : 1.0f / sum;
        if (row >= place_.rows) continue;
        tile::store_row(out_row<T>(a_, place_, row), out_[r / 2], r % 2 * 2, inverse, a_.p.dim_v,
                        a_.vector_out);
      }
    } else {
      stage();
      __syncwarp();  // a warp stores the rows that it staged
      store_staged();
    }
    if (a_.lse.data != nullptr) store_stats();
  }

  // Each of the four lanes that hold the same rows stores the lse of one.
  __device__ __forceinline__ void store_stats() const {
    const int mine = lane() % 4, row = row_in_tile<kM>(mine);
    float reference = softmax_.reference[0], sum = softmax_.sum[0];
#pragma unroll
    for (int r = 1; r < 2 * kM; ++r) {
      if (r == mine) {
        reference = softmax_.reference[r];
        sum = softmax_.sum[r];
      }
    }
    if (mine < 2 * kM && row < place_.rows) store_lse(a_, place_, row, reference, sum);
  }

  // 16-bit outputs pass through the shared memory of Q, to be written 16 bytes at a time. A block
  // goes through this code once, so that every instruction of it is fetched anew: it is kept short.
  __device__ __forceinline__ void stage() {
    const auto at = TileOut::Lane::fragments();
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      const float sum = softmax_.sum[r], scale = sum == 0 ? 0.0f : __fdividef(1.0f, sum);
#pragma unroll
      for (int d = 0; d < kOut; ++d) {
        const uint32_t two =
            ptx::pack<T>(out_[r / 2][d][r % 2 * 2] * scale, out_[r / 2][d][r % 2 * 2 + 1] * scale);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(s_q_ + at.at(first_row() + r * 8, d * 8)),
                     "r"(two)
                     : "memory");
      }
    }
  }

  __device__ __forceinline__ void store_staged() const {
    if (place_.span.one_head && a_.vector_out) {
      store_neighbours();
      return;
    }
#pragma unroll 1
    for (int x = lane(); x < 16 * kM * kChunks; x += 32) {
      const int row = first_row() + x / kChunks, chunk = x % kChunks;
      if (row >= place_.rows || chunk * 8 >= a_.p.dim_v) continue;
      store_words(out_row<T>(a_, place_, row) + chunk * 8, load_words(TileOut::offset(row, chunk)),
                  a_.p.dim_v - chunk * 8, a_.vector_out);
    }
  }

  // The same of rows of one head, which lie one after another: as many whole ones at a time as the
  // lanes hold.
  __device__ __forceinline__ void store_neighbours() const {
    constexpr int kRowsAtOnce = 32 / kChunks, kTimes = 16 * kM / kRowsAtOnce;
    constexpr int kBatch = 4;  // read before they are written
    const int chunk = lane() % kChunks, row = first_row() + lane() / kChunks;
    const bool takes_part = lane() < kRowsAtOnce * kChunks && chunk * 8 < a_.p.dim_v;
    const int rows = takes_part ? place_.rows - row : 0;
    T* to = out_row<T>(a_, place_, row) + chunk * 8;
    const int64_t step = kRowsAtOnce * a_.out.row;
#pragma unroll
    for (int i = 0; i < kTimes; i += kBatch) {
      uint4 words[kBatch];
#pragma unroll
      for (int x = i; x < i + kBatch && x < kTimes; ++x) {
        words[x - i] = load_words(offset_below(row, x * kRowsAtOnce, chunk));
      }
#pragma unroll
      for (int x = i; x < i + kBatch && x < kTimes; ++x) {
        if (x * kRowsAtOnce < rows) ptx::store_16(to, words[x - i]);
        to += step;
      }
    }
  }

  // Unnormalised sums, their reference max and sum of weights, for the merge.
  __device__ __forceinline__ void store_partial() {
    const int64_t first = partial_index(a_, place_);
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      const int row = row_in_tile<kM>(r);
      if (row >= place_.rows) continue;
      float* const to = partial_row(a_, place_) + static_cast<int64_t>(row) * a_.p.dim_v;
#pragma unroll
      for (int d = 0; d < kOut; ++d) {
        const int col = d * 8 + lane() % 4 * 2;
        if (col < a_.p.dim_v) to[col] = out_[r / 2][d][r % 2 * 2];
        if (col + 1 < a_.p.dim_v) to[col + 1] = out_[r / 2][d][r % 2 * 2 + 1];
      }
      if (lane() % 4 == 0) {
        a_.parts.stats[first + row] = make_float2(softmax_.reference[r], softmax_.sum[r]);
      }
    }
  }

 private:
  // Worked out here, not kept since the start: there is no register to spare.
  static __device__ __forceinline__ uint32_t thread() {
    uint32_t thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    return thread;
  }
  static __device__ __forceinline__ int first_row() { return thread() / 32 * 16 * kM; }
  static __device__ __forceinline__ int lane() { return thread() % 32; }

  // Of a chunk `down` rows below `row`, which is less than a power of two that `down` is a multiple
  // of, from a multiple of 8 on: what differs as chunks are exchanged is known beforehand.
  static __device__ __forceinline__ uint32_t offset_below(int row, int down, int chunk) {
    if constexpr (32 % kChunks != 0) return TileOut::offset(row + down, chunk);
    return (TileOut::offset(row, chunk) ^ (down % 8 * 16)) + down * TileOut::row_bytes(0);
  }

  // Eight columns of a row, from an offset in the tile.
  __device__ __forceinline__ uint4 load_words(uint32_t at) const {
    uint4 words;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(s_q_ + at));
    return words;
  }

  const ForwardArguments& a_;
  const Place& place_;
  const uint32_t s_q_;
  const RunningSoftmax<kM>& softmax_;
  const Sums& out_;
};

}  // namespace fovea::cuda
