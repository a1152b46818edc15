// Where a block's rows and keys lie: query rows numbered through the heads of a group, and the
// tiles of keys that they visit.
#pragma once

#include "backend/cuda/common/sequence.cuh"
#include "backend/cuda/portable/arguments.h"

namespace fovea::cuda {

// A row of a KV head: rows are numbered through the query heads of its group, head-major.
struct Row {
  int head;  // within the group
  int i;

  __device__ __forceinline__ static Row at(const Sequence& s, int row) {
    const int head = row < s.q_len || s.q_len == 0 ? 0 : row / s.q_len;
    return {head, row - head * s.q_len};
  }
};

// The quotient; what is left goes to `rest`.
__device__ __forceinline__ int divide(const Divider& by, int n, int& rest) {
  const int quotient = by(n);
  rest = n - quotient * static_cast<int>(by.divisor);
  return quotient;
}

// Neighbouring rows of a group: most often of one head, and then found without a division each.
struct RowSpan {
  Row first;
  int row;
  bool one_head;

  __device__ __forceinline__ static RowSpan at(const Sequence& s, int row, int rows) {
    const Row first = Row::at(s, row);
    return {first, row, first.i + rows <= s.q_len};
  }
  __device__ __forceinline__ Row of(const Sequence& s, int r) const {
    return one_head ? Row{first.head, first.i + r} : Row::at(s, row + r);
  }
  // The least and the greatest query of the first `rows` rows.
  __device__ __forceinline__ int low() const { return one_head ? first.i : 0; }
  __device__ __forceinline__ int high(const Sequence& s, int rows) const {
    return one_head ? first.i + rows - 1 : s.q_len - 1;
  }
};

// The row in a block's tile of index r of the 2 kM that a lane holds; kSharing neighbouring warps
// hold the same rows.
template <int kM, int kSharing = 1>
__device__ __forceinline__ int row_in_tile(int r) {
  const int warp = threadIdx.x / 32 / kSharing, lane = threadIdx.x % 32;
  return (warp * kM + r / 2) * 16 + r % 2 * 8 + lane / 4;
}

// Which rows of which KV head, and which of its keys, are a block's. Kept in shared memory: what is
// seldom needed would cost the sums their registers.
struct Place {
  Sequence s;
  int b, head_kv;
  int row, rows;  // of the group
  int key_begin, key_end;
  RowSpan span;
};

// The tiles of keys that a range of rows has to visit, the window's from the last to the first and
// then the prefix's; and the keys that every one of the rows sees.
struct KeyTiles {
  int first, last;  // of the window: tiles [first, last)
  int prefix;       // tiles [0, prefix) besides
  int all_begin, all_end, all_prefix;

  __device__ __forceinline__ int count() const {
    return (last > first ? last - first : 0) + prefix;
  }
  __device__ __forceinline__ int tile(int n) const {
    const int window = last > first ? last - first : 0;
    return n < window ? last - 1 - n : prefix - 1 - (n - window);
  }
  // The n of a tile that is visited.
  __device__ __forceinline__ int index_of(int tile) const {
    return tile < prefix ? count() - 1 - tile : last - 1 - tile;
  }
  // The first n from which on every row sees all keys of the tiles, which then follow each other
  // downwards; count() where a window or a prefix ends them otherwise. Tiles of `size` keys from
  // `begin` on.
  __device__ __forceinline__ int seen_whole_from(int begin, int size) const {
    if (prefix > 0 || begin + first * size < all_begin) return count();
    return clamp_to(last - max(all_end - begin, 0) / size, 0, count());
  }
  __device__ __forceinline__ bool seen_by_all(int begin, int end) const {
    return (end <= all_end && (begin >= all_begin || all_begin <= all_prefix)) || end <= all_prefix;
  }
};

// The first `rows` rows of the span, keys [key_begin, key_end) in tiles of `tile`.
__device__ __forceinline__ KeyTiles key_tiles(const Problem& p, const Sequence& s,
                                              const RowSpan& span, int rows, int key_begin,
                                              int key_end, int tile) {
  if (sees_all(p)) {
    return {0, (key_end - key_begin + tile - 1) / tile, 0, 0, s.kv_len, 0};
  }
  const Sight low = sight_of(p, s, span.low());
  const Sight high = sight_of(p, s, span.high(s, rows));
  KeyTiles t;
  const int begin = max(low.begin, key_begin), end = min(high.end, key_end);
  const int prefix = min(low.prefix, key_end);
  t.prefix = prefix > key_begin ? (prefix - key_begin + tile - 1) / tile : 0;
  t.first = max((begin - key_begin) / tile, t.prefix);
  t.last = end > begin ? (end - key_begin + tile - 1) / tile : 0;
  t.all_begin = high.begin;
  t.all_end = low.end;
  t.all_prefix = low.prefix;
  return t;
}

}  // namespace fovea::cuda
