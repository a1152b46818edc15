// The tiles of query rows that a block of keys climbs: those of its group that see some of its
// keys.
#pragma once

#include "backend/cuda/portable/backward/sums.cuh"

namespace fovea::cuda {

// A tile of query rows that a block visits.
struct Rung {
  int tile;  // past the last: there are no more
  Row first;
  bool one_head;
  bool masked;  // some row may not see some key
  int keys;     // that some row may see, from the block's first on

  __device__ __forceinline__ RowSpan span(int rows) const { return {first, tile * rows, one_head}; }
};

// Where a block of keys is: in shared memory, as `Place` is. `row` and `rows` are the positions of
// queries that may see the keys.
struct KeyPlace : Place {
  int tile_end;     // of this block's part of the rows
  int64_t sum_row;  // of the group's first query row
  bool dirty_keys;  // not all of them are finite
  Rung rungs[4];    // the one at hand, those before and after it, and one being found
};

// Called by one thread, for what it finds is in shared memory.
template <int kTileKv, int kTileQ>
struct Ladder {
  // Finds the block's place and its first two rungs.
  static __device__ __forceinline__ void find_place(const BackwardArguments& a, KeyPlace& place) {
    const Problem& p = a.p;
    const int tiles = (p.kv_len + kTileKv - 1) / kTileKv;
    const int item = blockIdx.x / a.row_parts, part = blockIdx.x % a.row_parts;
    place.b = item / tiles / p.head_kv;
    place.head_kv = item / tiles % p.head_kv;
    place.s = sequence_at(p, place.b);
    place.key_begin = item % tiles * kTileKv;
    place.key_end = min(place.key_begin + kTileKv, place.s.kv_len);
    const int64_t shift = place.s.kv_len - place.s.q_len;
    int64_t first = 0, end = place.s.q_len;
    if (p.prefix <= place.key_begin) {
      if (p.right >= 0) first = max(first, place.key_begin - int64_t{p.right} - shift);
      if (p.left >= 0) end = min(end, place.key_end + int64_t{p.left} - shift);
    }
    if (place.key_begin >= place.key_end || end < first) first = end = 0;
    place.row = static_cast<int>(first);
    place.rows = static_cast<int>(end - first);
    const int64_t row_tiles = (p.group * place.s.q_len + kTileQ - 1) / kTileQ;
    place.tile_end = static_cast<int>((part + 1) * row_tiles / a.row_parts);
    if (a.dq_sum != nullptr) place.sum_row = query_sum_row(p, place);
    place.rungs[0] = rung_from(p, place, static_cast<int>(part * row_tiles / a.row_parts));
    place.rungs[1] = rung_from(p, place, place.rungs[0].tile + 1);
  }

  // The first tile from `tile` on that may see the keys.
  static __device__ __forceinline__ Rung rung_from(const Problem& p, const KeyPlace& place,
                                                   int tile) {
    const int q_len = place.s.q_len, begin = place.key_begin, end = begin + kTileKv;
    while (place.rows > 0 && tile < place.tile_end) {
      const RowSpan span = RowSpan::at(place.s, tile * kTileQ, kTileQ);
      const int i = span.first.i;
      if (span.one_head && i >= place.row + place.rows) {
        tile = (span.first.head + 1) * q_len / kTileQ;
      } else if (span.one_head && i + kTileQ <= place.row) {
        tile = (span.first.head * q_len + place.row) / kTileQ;
      } else {
        const Sight low = sight_of(p, place.s, span.one_head ? i : 0);
        const Sight high = sight_of(p, place.s, span.one_head ? i + kTileQ - 1 : q_len - 1);
        const bool whole = (tile + 1) * kTileQ <= p.group * q_len;
        const bool seen = (high.begin <= begin && low.end >= end) || low.prefix >= end;
        const int keys = span.one_head ? max(high.end, high.prefix) - begin : kTileKv;
        return {tile, span.first, span.one_head, !(whole && seen), clamp_to(keys, 0, kTileKv)};
      }
    }
    return {place.tile_end, {}, false, false, 0};
  }
};

}  // namespace fovea::cuda
