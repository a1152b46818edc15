// Rows of a call's tensors into tiles of shared memory.
#pragma once

#include "backend/cuda/portable/geometry.cuh"
#include "prim/cuda/tile/shared_tile.cuh"

namespace fovea::cuda {

// Where a sequence's row 0 of a head lies.
template <typename T>
__device__ __forceinline__ T* rows_at(const Rows& t, const Sequence& s, int64_t first_row,
                                      int64_t head) {
  return static_cast<T*>(t.data) + s.batch_at * t.batch + first_row * t.row + head * t.head;
}

// Rows to fill of a tile of which the first `rows` exist: whole fragments, no more.
template <typename Tile, int kStep = 32>
__device__ __forceinline__ int whole_fragments(int rows) {
  return min(Tile::kRows, (max(rows, 0) + kStep - 1) / kStep * kStep);
}

// Keys (or their values) from `first` on; those from `end` on become zeros.
template <typename T, typename Tile, int kThreads, tile::RowOrder kOrder = tile::RowOrder::kPlain>
__device__ __forceinline__ void load_keys(uint32_t shared, const Rows& t, const Place& place,
                                          int first, int end, int cols, bool vector) {
  const T* const base = rows_at<const T>(t, place.s, place.s.kv_row + first, place.head_kv);
  tile::TileLoader<T, Tile, kThreads, kOrder>::fill(shared, base, t.row, end - first, cols, vector);
}

// Query rows of the KV head's group, or of a tensor shaped like them. What is not whole goes one
// way, or, with kOneHead, another if it is of one head: more code, which where there is little else
// to do is 1 % faster.
template <typename T, typename Tile, int kThreads, bool kOneHead = false>
__device__ __forceinline__ void load_queries(uint32_t shared, const Rows& t, const Place& place,
                                             int group, const RowSpan& span, int rows, int cols,
                                             bool vector, int filled = Tile::kRows) {
  using Loader = tile::TileLoader<T, Tile, kThreads>;
  const T* const base = rows_at<const T>(t, place.s, place.s.q_row, place.head_kv * group);
  if (span.one_head && (kOneHead || Loader::takes_whole(rows, cols, vector))) {
    Loader::fill(shared, base + span.first.head * t.head + span.first.i * t.row, t.row, rows, cols,
                 vector, filled);
    return;
  }
  Loader::fill_rows(
      shared,
      [&](int r) {
        const Row row = span.of(place.s, r);
        return base + row.head * t.head + row.i * t.row;
      },
      rows, cols, vector, filled);
}

}  // namespace fovea::cuda
