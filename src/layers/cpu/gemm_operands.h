// The operands of products by blocks, one stretch of the contraction at a time: read where they
// lie, or packed as a matrix class (prim/cpu/matrix.h) wants them.
#pragma once

#include "layers/cpu/gemm.h"
#include "prim/cpu/matrix.h"

namespace fovea::FOVEA_ISA {

using layers::cpu::Gemm;

template <typename T, typename M>
struct GemmOperands {
  using Elem = typename M::Elem;

  static constexpr int64_t kMostRows = 256;  // of a tile
  static constexpr bool kRowsAsTheyLie = M::kLeftIsRows && sizeof(T) == sizeof(Elem);
  static constexpr bool kSlices = M::kLeftIsSliced;
  // Rows that meet b at once: with short vectors so few that a chunk of them stays in the first
  // cache while b passes. Those that lie side by side are packed so, at each depth.
  static constexpr int64_t kRowsNear = kLanes == 4 && M::kLeftIsRows ? 8 : kMostRows;
  static constexpr int64_t kSideBySide = kLanes == 4 && M::kTransposedLeftIsAView ? 32 : kMostRows;
  static constexpr int kRowsAhead = 8;  // asked for while some are packed

  static int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
  static int64_t parts(int64_t n, int64_t of) { return (n + of - 1) / of; }
  static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

  // One stretch of the contraction.
  struct Chunk {
    int64_t block = 0, first = 0, length = 0;
    int64_t padded() const { return up(length, M::kDepthAlign); }
  };
  struct Product : Gemm {
    bool sliced = false;  // whether rows are packed in slices
  };
  struct Tile {
    int64_t batch = 0, row = 0, rows = 0, col = 0, cols = 0;
  };

  // Elements of a tile's packed rows.
  static constexpr int64_t left_size(int64_t longest_chunk) {
    if constexpr (kSlices) return M::slices_size(kMostRows, longest_chunk);
    return kMostRows * longest_chunk;
  }

  // Whether rows can be read as they lie.
  static bool lies(const Gemm& g) { return kRowsAsTheyLie && g.a.depth == 1; }

  static const T* first_of_a(const Product& m, const Tile& t, const Chunk& chunk) {
    return static_cast<const T*>(m.a.data) + t.batch * m.a.batch + t.row * m.a.row +
           chunk.block * m.a.block + chunk.first * m.a.depth;
  }

  static auto slices_of(const Product& m, const Tile& t, const Chunk& chunk, Elem* own) {
    const int length = static_cast<int>(chunk.length), padded = static_cast<int>(chunk.padded());
    M::pack_left_slices(own, first_of_a(m, t, chunk), m.a.row, m.a.depth, static_cast<int>(t.rows),
                        length, padded);
    return M::slices(own, padded);
  }

  // The tile's rows of one chunk: where they lie, if the matrix class can read them there.
  static typename M::Left left_of(const Product& m, const Tile& t, const Chunk& chunk, Elem* own) {
    const T* const a = first_of_a(m, t, chunk);
    const int rows = static_cast<int>(t.rows), length = static_cast<int>(chunk.length);
    const int padded = static_cast<int>(chunk.padded());
    if (m.a.depth != 1) return transposed_left(m, a, rows, length, padded, own);
    if constexpr (kRowsAsTheyLie) {
      if (length == padded && rows % M::kRowAlign == 0) return M::left(a, m.a.row);
    }
    for (int r = 0; r < rows; ++r) {
      if (r + kRowsAhead < rows) prefetch_to_read(a + (r + kRowsAhead) * m.a.row, length);
      M::pack_left_row(own, padded, r, a + r * m.a.row, length, padded);
    }
    return M::left(own, padded);
  }

  // Rows that are neighbours in memory: the gradient of a weight.
  static typename M::Left transposed_left(const Product& m, const T* a, int rows, int length,
                                          int padded, Elem* own) {
    if constexpr (M::kTransposedLeftIsAView) {
      const int wide = static_cast<int>(least(up(rows, 2 * kLanes), kSideBySide));
      for (int k = 0; k < padded; ++k) {
        if (k + kRowsAhead < length) prefetch_to_read(a + (k + kRowsAhead) * m.a.depth, rows);
        for (int r = 0; r < rows; r += wide) {
          const int64_t there = k < length ? least(wide, rows - r) : 0;
          M::pack_left_row(own + r * padded, wide, k, a + k * m.a.depth + r,
                           static_cast<int>(there), wide);
        }
      }
      return M::transposed(M::left(own, wide));
    } else {
      M::template pack_left_transposed<T>(own, padded, a, m.a.depth, length, rows, padded,
                                          static_cast<int>(up(rows, 32)));
      return M::left(own, padded);
    }
  }

  // Whether b's rows lie as they are packed, so that some depths can be packed of all columns.
  static bool rows_lie(const Gemm& g) { return kSlices && g.b.col == 1; }
  // Depths from `from` on, up to `most`, of a chunk's columns [first, first + count).
  static void pack_b_depths(const Product& m, const Chunk& chunk, int64_t first, int64_t count,
                            int64_t from, int64_t most, Elem* to) {
    if constexpr (kSlices) {
      const int64_t depth = least(most, chunk.length - from);
      if (depth <= 0) return;  // the last chunk may be short
      const T* const b = static_cast<const T*>(m.b.data) + chunk.block * m.b.block +
                         (chunk.first + from) * m.b.depth + first;
      M::template pack_right<T>(to + from * M::kPanel, b, m.b.depth, static_cast<int>(depth),
                                static_cast<int>(up(depth, M::kDepthAlign)),
                                static_cast<int>(count), chunk.padded());
    }
  }

  // Columns [first, first + count) of a chunk; `gathered` has room for them where neither stride
  // of b is 1.
  static void pack_b(const Product& m, const Chunk& chunk, int64_t first, int64_t count, Elem* to,
                     T* gathered) {
    const T* b = static_cast<const T*>(m.b.data) + chunk.block * m.b.block +
                 chunk.first * m.b.depth + first * m.b.col;
    const int length = static_cast<int>(chunk.length), padded = static_cast<int>(chunk.padded());
    const int cols = static_cast<int>(count);
    if (m.b.col == 1) {
      M::template pack_right<T>(to, b, m.b.depth, length, padded, cols);
      return;
    }
    int64_t stride = m.b.col;
    if (m.b.depth != 1) {
      for (int64_t c = 0; c < count; ++c) {
        for (int64_t k = 0; k < length; ++k) {
          gathered[c * length + k] = b[c * m.b.col + k * m.b.depth];
        }
      }
      b = gathered;
      stride = length;
    }
    M::template pack_right_transposed<T>(to, b, stride, cols, length, padded);
  }
};

}  // namespace fovea::FOVEA_ISA
