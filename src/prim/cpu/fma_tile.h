// Products of a tile in registers: some rows of a left operand with a panel of a right one, two
// vectors wide. One loop for each way that the left operand may lie: where its strides are numbers
// that the compiler knows, or the few that addresses hold, nothing but products and loads is left.
#pragma once

#include "prim/cpu/simd_math.h"

namespace fovea::FOVEA_ISA {

constexpr int kTileColumns = 2 * kLanes;  // of a panel, which holds them side by side at each depth
constexpr int kDepthsAtOnce = 4;  // so that what a loop costs is shared; depths are multiples
constexpr int kSliceRows = 12;    // 24 of 32 registers hold sums

// Element (r, k) lies at data[r * row + k].
struct LeftByRows {
  const float* data;
  int64_t row;
  LeftByRows from_row(int r) const { return {data + r * row, row}; }
};
// At data[r + k * depth].
struct LeftByColumns {
  const float* data;
  int64_t depth;
  LeftByColumns from_row(int r) const { return {data + r, depth}; }
};
// A right operand read as a left one: its rows are the depth of the one, the rows of the other.
struct LeftOfPanels {
  const float* data;
  int64_t panel;  // from one panel to the next
  LeftOfPanels from_row(int r) const { return {data + r * kTileColumns, panel}; }
};
// Rows side by side, kSliceRows of them at each depth, one slice after another.
struct LeftSlices {
  const float* data;
  int64_t slice;  // from one to the next
  LeftSlices from_row(int r) const {
    return {data + r / kSliceRows * slice + r % kSliceRows, slice};
  }
};

template <int kRows>
using TileSums = Vec[kRows][2];

// sums += what one depth adds: left(r) is row r's element there, in every lane.
template <int kRows, typename LeftAt>
FOVEA_INLINE void add_depth(TileSums<kRows>& sums, const float* b, LeftAt left) {
  const Vec b0 = load(b), b1 = load(b + kLanes);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const Vec x = left(r);
    sums[r][0] = fma_in_place(x, b0, sums[r][0]);
    sums[r][1] = fma_in_place(x, b1, sums[r][1]);
  }
}

template <int kRows>
FOVEA_INLINE void add_products(TileSums<kRows>& sums, int depth, LeftByRows a,
                               const float* b) requires(!kFmaTakesALane) {
  // An address is a base, and once or twice a stride.
  constexpr int kOfBase = 3;
  const float* bases[(kRows + kOfBase - 1) / kOfBase];
  for (int r = 0; r < kRows; r += kOfBase) bases[r / kOfBase] = a.data + r * a.row;
  for (int k = 0; k < depth; k += kDepthsAtOnce) {
#pragma GCC unroll 4
    for (int i = 0; i < kDepthsAtOnce; ++i) {
      add_depth<kRows>(sums, b + i * kTileColumns, [&](int r) {
        return broadcast(bases[r / kOfBase][r % kOfBase * a.row + i]);
      });
    }
#pragma GCC unroll 4
    for (const float*& base : bases) base += kDepthsAtOnce;
    b += kDepthsAtOnce * kTileColumns;
  }
}

template <int kRows>
FOVEA_INLINE void add_products(TileSums<kRows>& sums, int depth, LeftByColumns a,
                               const float* b) requires(!kFmaTakesALane) {
  for (int k = 0; k < depth; k += kDepthsAtOnce) {
#pragma GCC unroll 4
    for (int i = 0; i < kDepthsAtOnce; ++i, a.data += a.depth) {
      add_depth<kRows>(sums, b + i * kTileColumns, [=](int r) { return broadcast(a.data[r]); });
    }
    b += kDepthsAtOnce * kTileColumns;
  }
}

template <int kRows>
FOVEA_INLINE void add_products(TileSums<kRows>& sums, int depth, LeftOfPanels a, const float* b) {
  for (int k = 0; k < depth; k += kTileColumns, a.data += a.panel) {
    add_products<kRows>(sums, kTileColumns, LeftByRows{a.data, kTileColumns}, b + k * kTileColumns);
  }
}

// b is long and comes from the second cache. Meanwhile what lies at `ahead`, farther away, is asked
// for, a line for each few depths, and `ahead` moves on.
template <int kRows>
FOVEA_INLINE void add_products(TileSums<kRows>& sums, int depth, LeftSlices a, const float* b,
                               const float*& ahead) {
  constexpr int kAhead = 8;  // depths of b
  for (int k = 0; k < depth; k += kDepthsAtOnce) {
    prefetch_to_read(ahead, kLanes);
    ahead += kLanes;
#pragma GCC unroll 4
    for (int i = 0; i < kDepthsAtOnce; ++i) {
      prefetch_to_read(b + (i + kAhead) * kTileColumns, kTileColumns);
      add_depth<kRows>(sums, b + i * kTileColumns,
                       [=](int r) { return broadcast(a.data[i * kSliceRows + r]); });
    }
    a.data += kDepthsAtOnce * kSliceRows;
    b += kDepthsAtOnce * kTileColumns;
  }
}

// The left operand as lanes of vectors along its rows. What the next step needs is loaded where
// a register becomes free, between products: many loads in a row would leave the vector units
// without work. The last step loads its own operands again.
template <int kRows>
FOVEA_INLINE void add_products(TileSums<kRows>& sums, int depth, LeftByRows a,
                               const float* b) requires kFmaTakesALane {
  Vec x[kRows];
  for (int r = 0; r < kRows; ++r) x[r] = load(a.data + r * a.row);
  Vec b0 = load(b), b1 = load(b + kLanes);
  for (int k = 0; k < depth; k += kLanes) {
    const bool last = k + kLanes >= depth;
    a.data += last ? 0 : kLanes;
#pragma GCC unroll 4
    for (int lane = 0; lane < kLanes; ++lane) {
      b += lane + 1 == kLanes && last ? 0 : kTileColumns;
      const Vec next0 = load(b), next1 = load(b + kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Vec left = broadcast(x[r][lane]);
        sums[r][0] = fma(left, b0, sums[r][0]);
        sums[r][1] = fma(left, b1, sums[r][1]);
        if (lane + 1 == kLanes) x[r] = load(a.data + r * a.row);
      }
      b0 = next0;
      b1 = next1;
    }
  }
}

// The left operand as lanes of vectors along its columns.
template <int kRows>
FOVEA_INLINE void add_products(TileSums<kRows>& sums, int depth, LeftByColumns a,
                               const float* b) requires kFmaTakesALane {
  for (int k = 0; k < depth; ++k) {
    const float* const column = a.data + k * a.depth;
    if constexpr (kRows % kLanes == 0) {
      Vec x[kRows / kLanes];
      for (int r = 0; r < kRows; r += kLanes) x[r / kLanes] = load(column + r);
      add_depth<kRows>(sums, b + k * kTileColumns,
                       [&](int r) { return broadcast(x[r / kLanes][r % kLanes]); });
    } else {
      add_depth<kRows>(sums, b + k * kTileColumns, [=](int r) { return broadcast(column[r]); });
    }
  }
}

}  // namespace fovea::FOVEA_ISA
