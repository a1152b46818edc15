// What a block of the forward pass leaves behind: outputs and lse, or the parts of them for a
// merge.
#pragma once

#include "backend/cuda/portable/forward/config.h"
#include "backend/cuda/portable/forward/softmax.cuh"
#include "backend/cuda/portable/loads.cuh"
#include "backend/cuda/portable/terms.cuh"
#include "prim/cuda/ptx/st_global.cuh"
#include "prim/cuda/tile/products.cuh"
#include "prim/cuda/tile/staged_rows.cuh"

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

  // Outputs pass through the shared memory of Q, to be written 16 bytes at a time.
  __device__ __forceinline__ void store() {
    tile::stage_rows<T, TileOut>(s_q_, first_row(), 0, out_, [&](int r) {
      const float sum = softmax_.sum[r];
      if constexpr (sizeof(T) == 4) return sum == 0 ? 0.0f : 1.0f / sum;
      return sum == 0 ? 0.0f : __fdividef(1.0f, sum);
    });
    __syncwarp();  // a warp stores the rows that it staged
    store_staged();
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

  __device__ __forceinline__ void store_staged() const {
    if constexpr (sizeof(T) == 2) {
      if (place_.span.one_head && a_.vector_out) {
        store_neighbours();
        return;
      }
    }
#pragma unroll 1
    for (int x = lane(); x < 16 * kM * kChunks; x += 32) {
      const int row = first_row() + x / kChunks, col = x % kChunks * TileOut::kPerChunk;
      if (row >= place_.rows || col >= a_.p.dim_v) continue;
      T* const to = out_row<T>(a_, place_, row) + col;
      const uint32_t from = s_q_ + TileOut::offset(row, x % kChunks);
      if constexpr (sizeof(T) == 4) {
        tile::store_staged(to, from, a_.p.dim_v - col, a_.vector_out);
      } else {  // from registers: by the other way that of computed terms at head dim 64 spills
        store_words(to, tile::load_16(from), a_.p.dim_v - col, a_.vector_out);
      }
    }
  }

  // The same of rows of one head, which lie one after another: as many whole ones at a time as the
  // lanes hold.
  __device__ __forceinline__ void store_neighbours() const {
    constexpr int kRowsAtOnce = 32 / kChunks, kTimes = 16 * kM / kRowsAtOnce;
    // Read before they are written; 8 rows or a multiple, after which the exchange repeats.
    constexpr int kBatch = kTimes < 4 ? kTimes : kRowsAtOnce == 1 ? 8 : 4;
    const int chunk = lane() % kChunks, row = first_row() + lane() / kChunks;
    const bool takes_part = lane() < kRowsAtOnce * kChunks && chunk * 8 < a_.p.dim_v;
    const int rows = takes_part ? place_.rows - row : 0;
    T* to = out_row<T>(a_, place_, row) + chunk * 8;
    const int64_t step = kRowsAtOnce * a_.out.row;
#pragma unroll 1
    for (int i = 0; i < kTimes; i += kBatch) {
      uint4 words[kBatch];
#pragma unroll
      for (int x = 0; x < kBatch; ++x) {
        words[x] = tile::load_16(s_q_ + offset_below(row, i * kRowsAtOnce, x * kRowsAtOnce, chunk));
      }
#pragma unroll
      for (int x = 0; x < kBatch; ++x) {
        ptx::store_16_if((i + x) * kRowsAtOnce < rows, to, words[x]);
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
      const int first_col = lane() % 4 * 2, cols = a_.p.dim_v - first_col;
      float* const to =
          partial_row(a_, place_) + static_cast<int64_t>(row) * a_.p.dim_v + first_col;
#pragma unroll
      for (int d = 0; d < kOut; ++d) {
        put(d * 8 < cols, to + d * 8, out_[r / 2][d][r % 2 * 2]);
        put(d * 8 + 1 < cols, to + d * 8 + 1, out_[r / 2][d][r % 2 * 2 + 1]);
      }
      if (lane() % 4 == 0) {
        a_.parts.stats[first + row] = make_float2(softmax_.reference[r], softmax_.sum[r]);
      }
    }
  }

 private:
  // By branches where the schedule of the loop over keys, which knows nothing of this, is 3 %
  // better with them.
  static __device__ __forceinline__ void put(bool there, float* to, float x) {
    if constexpr (kC.short_turns()) {
      if (there) *to = x;
    } else {
      ptx::store_if(there, to, x);
    }
  }

  // Worked out here, not kept since the start: there is no register to spare.
  static __device__ __forceinline__ uint32_t thread() {
    uint32_t thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    return thread;
  }
  static __device__ __forceinline__ int first_row() { return thread() / 32 * 16 * kM; }
  static __device__ __forceinline__ int lane() { return thread() % 32; }

  // Of a chunk below `row`, by `base` rows, a multiple of 8, and `down`, a constant with which
  // `row` has no bit in common: what differs as chunks are exchanged is known beforehand.
  static __device__ __forceinline__ uint32_t offset_below(int row, int base, int down, int chunk) {
    if constexpr (32 % kChunks != 0) return TileOut::offset(row + base + down, chunk);
    return (TileOut::offset(row, chunk) ^ (down % 8 * 16)) + (base + down) * TileOut::row_bytes(0);
  }

  const ForwardArguments& a_;
  const Place& place_;
  const uint32_t s_q_;
  const RunningSoftmax<kM>& softmax_;
  const Sums& out_;
};

}  // namespace fovea::cuda
