// Where a block of the forward pass is: its rows, the tiles of keys that they see, and what each
// warp sees of them. All of it in shared memory, for the sums leave few registers.
#pragma once

#include "backend/cuda/portable/forward/config.h"
#include "backend/cuda/portable/geometry.cuh"

namespace fovea::cuda {

// The keys that some row of a warp sees, and those that all of them see.
struct WarpSight {
  int any_begin, any_end, all_begin, all_end, prefix;

  __device__ __forceinline__ bool hides(int begin, int end) const {
    return (begin >= any_end || end <= any_begin) && begin >= prefix;
  }
  __device__ __forceinline__ bool shows(int begin, int end) const {
    return (begin >= all_begin && end <= all_end) || end <= prefix;
  }
};

struct ForwardPlace : Place {
  KeyTiles tiles;
  int count;                  // of them
  int plain;                  // of kernels that walk: from this one on all rows see all keys
  bool careful;               // the work is being done again
  bool nonfinite;             // and a tile held values that are not finite
  const void *keys, *values;  // the sequence's first
};
struct SharedForwardPlace : ForwardPlace {
  WarpSight warps[8];
};

template <typename Shape>
__device__ __forceinline__ void find_place(const ForwardArguments& a, ForwardPlace& place) {
  constexpr int kTileQ = Shape::kConfig.tile_q(), kTileKv = Shape::kConfig.tile_kv;
  const Problem& p = a.p;
  int item = blockIdx.x, head, rank;
  if constexpr (Shape::kConfig.in_rounds()) {
    int in_round;
    const int round = divide(a.of_round, item, in_round);
    const int blocks = min(gridDim.x - (item - in_round), a.of_round.divisor);
    if (round % 2 == 1) item += blocks - 1 - 2 * in_round;
  }
  if (a.longest_first) {
    rank = divide(a.of_heads, item, head);
  } else {
    head = divide(a.of_tiles, item, rank);
  }
  place.b = divide(a.of_head_kv, head, place.head_kv);
  place.s = sequence_at(p, place.b);
  // The last rows first: under a causal mask they are the longest.
  if (a.tiles_of_heads) {
    int head_of_group;
    const int back = divide(a.of_group, rank, head_of_group);
    const int i = ((p.q_len - 1) / kTileQ - back) * kTileQ;
    place.row = head_of_group * place.s.q_len + i;
    place.rows = min(place.s.q_len - i, kTileQ);
    place.span = {{head_of_group, i}, place.row, true};
  } else {
    place.row = (static_cast<int>(a.of_tiles.divisor) - 1 - rank) * kTileQ;
    place.rows = min(p.group * place.s.q_len - place.row, kTileQ);
    place.span = RowSpan::at(place.s, place.row, max(place.rows, 1));
  }
  place.key_begin = blockIdx.y * a.part_keys;
  place.key_end = min(place.key_begin + a.part_keys, place.s.kv_len);
  if (place.rows <= 0) return;
  // Where warps share rows, blocks are so short that keys which none of them sees would be noticed.
  if (Shape::kConfig.key_warps > 1 && !sees_all(p)) {
    const Sight high = sight_of(p, place.s, place.span.high(place.s, place.rows));
    place.key_end = min(place.key_end, max(high.end, high.prefix));
  }
  place.careful = place.nonfinite = false;
  place.tiles =
      key_tiles(p, place.s, place.span, place.rows, place.key_begin, place.key_end, kTileKv);
  place.count = place.key_end > place.key_begin ? place.tiles.count() : 0;
  if constexpr (Shape::kConfig.walks()) {
    place.plain =
        a.whole_rows ? place.tiles.seen_whole_from(place.key_begin, kTileKv) : place.count;
  }
}

// Of rows from `row` of the tile on; by one lane of the warp.
template <int kM>
__device__ __forceinline__ WarpSight sights_of_warp(const Problem& p, const Place& place, int row) {
  const int last = min(row + 16 * kM, place.rows) - 1;
  if (row > last) return {};
  if (sees_all(p)) return {0, place.s.kv_len, 0, place.s.kv_len, 0};
  const Row from = place.span.of(place.s, row), to = place.span.of(place.s, last);
  const bool one_head = from.head == to.head;
  const Sight low = sight_of(p, place.s, one_head ? from.i : 0);
  const Sight high = sight_of(p, place.s, one_head ? to.i : place.s.q_len - 1);
  return {low.begin, high.end, high.begin, low.end, low.prefix};
}

}  // namespace fovea::cuda
