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
  int turn;     // backward/turns.cuh

  __device__ __forceinline__ RowSpan span(int rows) const { return {first, tile * rows, one_head}; }
};

// Where a block of keys is: in shared memory, as `Place` is. `row` and `rows` are the positions of
// queries that may see the keys.
struct KeyPlace : Place {
  int tile_end;     // of this block's part of the rows
  int64_t sum_row;  // of the group's first query row
};

struct RungPlace : KeyPlace {
  bool dirty_keys;  // not all of them are finite
  Rung rungs[4];    // the one at hand, those before and after it, and one being found
};

// The rows of every head, [x, y), that may see some of the keys [begin, end). Int holds sums of
// lengths and reaches.
template <typename Int = int64_t>
__device__ __forceinline__ int2 seeing_rows(const Problem& p, const Sequence& s, int begin,
                                            int end) {
  const Int shift = s.kv_len - s.q_len;
  Int first = 0, last = s.q_len;
  if (p.prefix <= begin) {
    if (p.right >= 0) first = max(first, begin - Int{p.right} - shift);
    if (p.left >= 0) last = min(last, end + Int{p.left} - shift);
  }
  if (begin >= end || last < first) first = last = 0;
  return {static_cast<int>(first), static_cast<int>(last)};
}

// Those that see all of them, were there so many.
template <typename Int = int64_t>
__device__ __forceinline__ int2 clear_rows(const Problem& p, const Sequence& s, int begin,
                                           Int end) {
  const Int shift = s.kv_len - s.q_len;
  Int first = 0, last = s.q_len;
  if (end > s.kv_len) return {0, 0};
  if (p.prefix < end) {
    if (p.right >= 0) first = max(first, end - p.right - 1 - shift);
    if (p.left >= 0) last = min(last, Int{begin} + p.left - shift + 1);
  }
  return {static_cast<int>(min(first, Int{s.q_len})), static_cast<int>(max(last, Int{0}))};
}

// Called by one thread, for what it finds is in shared memory.
template <int kTileKv, int kTileQ>
struct Ladder {
  // Finds the place of a block; the first of its tiles of rows.
  static __device__ __forceinline__ int find_place(const BackwardArguments& a, int block,
                                                   KeyPlace& place) {
    const Problem& p = a.p;
    const int item = a.of_parts(block), part = block - item * a.row_parts;
    // First keys first, whose rows are the most where queries do not see later ones; or head by
    // head.
    const int heads = a.batch * p.head_kv, tiles = (p.kv_len + kTileKv - 1) / kTileKv;
    const int first = a.first_keys_first ? a.of_heads(item) : item / tiles;
    const int second = item - first * (a.first_keys_first ? heads : tiles);
    const int head = a.first_keys_first ? second : first;
    const int tile = a.first_keys_first ? first : second;
    enter(a, place, head, tile);
    // Below 2^31 with the most parts.
    const uint32_t row_tiles = tiles_of_rows(p, place);
    place.tile_end = a.of_parts((part + 1) * row_tiles);
    return a.of_parts(part * row_tiles);
  }

  // The same with even parts, which are of the rows that see the keys alone.
  static __device__ __forceinline__ int find_even_place(const BackwardArguments& a,
                                                        KeyPlace& place) {
    const int block = blockIdx.x;
    int tile = 0, head;
    while (block >= a.even.first_block[tile + 1]) ++tile;
    const int first = a.even.first_block[tile];
    const int parts = a.of_heads(a.even.first_block[tile + 1] - first);
    const int part = divide(a.of_heads, block - first, head);
    enter(a, place, head, tile);
    const int seen = a.p.group * place.rows, of_part = (seen + parts - 1) / parts;
    // The tile of a row, counted among those that see the keys.
    const auto tile_of = [&](int row) {
      if (row >= seen) return tiles_of_rows(a.p, place);
      const int in_group = row / place.rows;
      return (in_group * (place.s.q_len - place.rows) + place.row + row) / kTileQ;
    };
    place.tile_end = tile_of((part + 1) * of_part);
    return tile_of(part * of_part);
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
        return {tile, span.first, span.one_head, !(whole && seen), clamp_to(keys, 0, kTileKv), 0};
      }
    }
    return {place.tile_end, {}, false, false, 0, 0};
  }

 private:
  static __device__ __forceinline__ int tiles_of_rows(const Problem& p, const Place& place) {
    return (p.group * place.s.q_len + kTileQ - 1) / kTileQ;
  }
  // All of a place but its part of the rows.
  static __device__ __forceinline__ void enter(const BackwardArguments& a, KeyPlace& place,
                                               int head, int tile) {
    const Problem& p = a.p;
    place.b = a.of_head_kv(head);
    place.head_kv = head - place.b * p.head_kv;
    place.s = sequence_at(p, place.b);
    place.key_begin = tile * kTileKv;
    place.key_end = min(place.key_begin + kTileKv, place.s.kv_len);
    const int2 rows = seeing_rows(p, place.s, place.key_begin, place.key_end);
    place.row = rows.x;
    place.rows = rows.y - rows.x;
    if (a.dq_sum != nullptr) place.sum_row = query_sum_row(p, place);
  }
};

}  // namespace fovea::cuda
