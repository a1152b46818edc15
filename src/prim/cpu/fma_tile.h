// Products of a tile in registers: some rows of a left operand with a panel of a right one, two
// vectors wide. One loop for each way that the left operand may lie: where its strides are numbers
// that the compiler knows, or the few that addresses hold, nothing but products and loads is left.
#pragma once

#include "prim/cpu/simd_math.h"

namespace fovea::FOVEA_ISA {

constexpr int kTileColumns = 2 * kLanes;  // of a panel, which holds them side by side at each depth
// In a turn of a loop, so that what it costs is shared; depths are multiples of 4. With 16
// registers, of which sums and operands take 15, GCC moves sums about in longer turns.
constexpr int kDepthsAtOnce = kVectorRegisters == 16 ? 1 : 4;
constexpr int kSliceRows = 12;  // 24 of 32 registers hold sums

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

// A depth of a panel.
struct PanelRow {
  Vec half[2];
  FOVEA_INLINE explicit PanelRow(const float* b) : half{load(b), load(b + kLanes)} {}
};

// sums += what one depth adds; row r's number there is at left(r). Some rows broadcast it in their
// products: so less has to be fetched and decoded, and loads do not take longer than products.
template <int kRows, typename LeftAt>
FOVEA_INLINE void add_depth(TileSums<kRows>& sums, const PanelRow& b, LeftAt left) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    if (r % 3 == 0) {
      for (int i = 0; i < 2; ++i) sums[r][i] = fma_of_number(left(r), b.half[i], sums[r][i]);
    } else {
      const Vec x = broadcast(*left(r));
      for (int i = 0; i < 2; ++i) sums[r][i] = fma_in_place(x, b.half[i], sums[r][i]);
    }
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
      add_depth<kRows>(sums, PanelRow(b + i * kTileColumns),
                       [&](int r) { return bases[r / kOfBase] + r % kOfBase * a.row + i; });
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
      add_depth<kRows>(sums, PanelRow(b + i * kTileColumns), [=](int r) { return a.data + r; });
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

// b is long and comes from the second cache, so it is loaded two depths before it is needed.
// Meanwhile what lies at `ahead`, farther away, is asked for, a line for each few depths, and
// `ahead` moves on. The last depths stand apart, so that the others need not ask whether more
// follow: whatever is not a product costs as much as one where another thread shares the core.
template <int kRows>
FOVEA_INLINE void add_products(TileSums<kRows>& sums, int depth, LeftSlices a, const float* b,
                               const float*& ahead) {
  PanelRow soon[2] = {PanelRow(b), PanelRow(b + kTileColumns)};
  const auto add_depths = [&](int loaded) FOVEA_INLINED {
    prefetch_to_read(ahead, kLanes);
    ahead += kLanes;
#pragma GCC unroll 4
    for (int i = 0; i < kDepthsAtOnce; ++i) {
      add_depth<kRows>(sums, soon[i % 2], [=](int r) { return a.data + i * kSliceRows + r; });
      if (i + 2 < loaded) soon[i % 2] = PanelRow(b + (i + 2) * kTileColumns);
    }
  };
  const float* const last = a.data + (depth - kDepthsAtOnce) * kSliceRows;
  while (a.data != last) {
    add_depths(kDepthsAtOnce + 2);
    a.data += kDepthsAtOnce * kSliceRows;
    b += kDepthsAtOnce * kTileColumns;
  }
  add_depths(kDepthsAtOnce);
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
  const auto add = [&](const PanelRow& row, auto left) FOVEA_INLINED {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec x = left(r);
      for (int i = 0; i < 2; ++i) sums[r][i] = fma(x, row.half[i], sums[r][i]);
    }
  };
  for (int k = 0; k < depth; ++k, a.data += a.depth) {
    const PanelRow row(b + k * kTileColumns);
    if constexpr (kRows % kLanes == 0) {
      Vec x[kRows / kLanes];
      for (int r = 0; r < kRows; r += kLanes) x[r / kLanes] = load(a.data + r);
      add(row, [&](int r) { return broadcast(x[r / kLanes][r % kLanes]); });
    } else {
      add(row, [=](int r) { return broadcast(a.data[r]); });
    }
  }
}

}  // namespace fovea::FOVEA_ISA
