// Products of float blocks by vector FMA. See matrix.h for what the members mean.
#pragma once

#include <concepts>

#include "prim/cpu/fma_tile.h"

namespace fovea::FOVEA_ISA {

struct MatrixF32 {
  using Elem = float;
  static constexpr const char* kName = "f32";
  static constexpr Exp2 kExp2 = Exp2::kF32;
  static constexpr int kPanel = kTileColumns;
  static constexpr int kColumnAlign = kPanel;
  static constexpr int kRowAlign = 1;
  static constexpr int kDepthAlign =
      4;  // the backward pass stores four rows of a right operand at once
  static_assert(!kFmaTakesALane || kDepthAlign % kLanes == 0);  // lanes are depths
  static constexpr bool kTransposedLeftIsAView = true;
  static constexpr bool kLeftIsRows = true;
  static constexpr bool kOnePass = kLanes == 16;
  static constexpr int kSlotColumns = 2 * kColumnAlign;
  static constexpr bool kProductsAreOperands =
      kLanes != 4;  // panels so narrow are slow left operands
  // Where vectors are short a tile takes long, and its scores are to stay in the nearest cache.
  static constexpr int kTileQ = kLanes == 4 ? 32 : 64;
  static constexpr int kCutTileQ = kLanes == 16 ? 32 : 16;
  static constexpr int kTileKv = 256;
  static constexpr int kStreamRows = 4;
  static constexpr int kRowsPerTask = kLanes == 8 ? 512 : 1024;
  // Both operands of each of the backward pass's products, and the scores, stay in the nearest
  // cache.
  static constexpr int kBackwardTileQ = 64;
  static constexpr int kBackwardTileKv = 128;
  static constexpr int kBackwardCutTileQ = kCutTileQ;
  static constexpr int kRowsAtOnce =
      kVectorRegisters == 16 ? 6 : 8;  // accumulators: 12 of 16, or 16 of 32 registers
  // Of slices: their elements' addresses take one register, however many rows there are.
  static constexpr bool kLeftIsSliced = kLanes == 16;

  // Rows asked for ahead of the one that is packed, where that is known to pay.
  static constexpr int kRowsAhead = kLanes == 8 ? 0 : 16;

  struct Left {
    const float* data;
    int64_t row;    // stride between rows
    int64_t depth;  // stride along the contraction; one of the two strides is 1
  };
  static void begin() {}
  static void end() {}

  static Left left(const float* data, int64_t ld) { return {data, ld, 1}; }
  static Left left_from(const float* data, int64_t ld, int depth) { return {data + depth, ld, 1}; }
  static Left transposed(Left a) { return {a.data, a.depth, a.row}; }
  static LeftOfPanels left_of_right(const float* data, int64_t depth_pad, int depth) {
    return {data + depth * depth_pad, depth_pad * kPanel};
  }

  template <typename T>
  static void pack_left_row(float* dst, int64_t ld, int row, const T* src, int depth,
                            int depth_pad) {
    float* const to = dst + row * ld;
    int d = 0;
    for (; d + kLanes <= depth; d += kLanes) store(to + d, load(src + d));
    for (; d < depth_pad; d += kLanes) {
      const Vec x = d < depth ? load_first(src + d, depth - d) : zero();
      store_up_to(to + d, x, depth_pad - d);
    }
  }

  template <typename T>
  static void pack_left_transposed(float*, int64_t, const T*, int64_t, int, int, int, int) {}

  // A slice is written by whole vectors, and what they have beyond it after its last depth must not
  // meet the next one.
  static constexpr int64_t slice_size(int64_t depth_pad) { return depth_pad * kSliceRows + kLanes; }
  static constexpr int64_t slices_size(int64_t rows, int64_t depth_pad) {
    return (rows + kSliceRows - 1) / kSliceRows * slice_size(depth_pad);
  }
  static LeftSlices slices(const float* packed, int64_t depth_pad) {
    return {packed, slice_size(depth_pad)};
  }

  // Element (r, k) is src[r * row + k * along]; one of the two strides is 1.
  template <typename T>
  static void pack_left_slices(float* dst, const T* src, int64_t row, int64_t along, int rows,
                               int depth, int depth_pad) {
    if (along == 1) {
      for (int m = 0; m < rows; m += kSliceRows, dst += slice_size(depth_pad)) {
        slice_of_rows(dst, src + m * row, row, rows - m, depth, depth_pad);
      }
      return;
    }
    // A few depths at a time: of src and of the slice, what is touched stays near.
    constexpr int kDepths = 8;
    for (int from = 0; from < depth_pad; from += kDepths) {
      const int to = from + kDepths < depth_pad ? from + kDepths : depth_pad;
      for (int k = from; k < to; ++k) ask_for_row(src, along, k, depth, rows);
      float* slice = dst;
      for (int m = 0; m < rows; m += kSliceRows, slice += slice_size(depth_pad)) {
        for (int k = from; k < to; ++k) {
          store(slice + k * kSliceRows,
                k < depth ? load_up_to(src + k * along + m, rows - m) : zero());
        }
      }
    }
  }

  // Some depths of panels that have panel_depth in all. With long vectors a few depths of all
  // columns follow each other: rows of src are read as they lie, and lines of panels written whole.
  template <typename T>
  static bool pack_right(float* dst, const T* src, int64_t stride, int depth, int depth_pad,
                         int cols, int64_t panel_depth) {
    constexpr bool kAsksBeside = kLanes == 16;
    constexpr int kDepths = kAsksBeside ? 8 : 1;
    Vec worst[2] = {zero(), zero()};  // 0 x is 0, or NaN when x is not finite
    for (int from = 0; from < depth_pad; from += kDepths) {
      const int end = from + kDepths < depth_pad ? from + kDepths : depth_pad;
      if constexpr (!kAsksBeside) ask_for_row(src, stride, from, depth, cols);
      for (int c = 0; c < cols; c += kPanel) {
        const int width = cols - c < kPanel ? cols - c : kPanel;
        float* to = dst + c * panel_depth + from * kPanel;
        for (int k = from; k < end; ++k, to += kPanel) {
          const T* const row = src + k * stride + c;
          if (kAsksBeside && k + kDepths < depth) prefetch_to_read(row + kDepths * stride, width);
          if constexpr (kRowsAhead != 0) prefetch_to_write(to + kRowsAhead / 2 * kPanel, kPanel);
          for (int half = 0; half < 2; ++half) {
            const int left = width - half * kLanes;
            const Vec x = k < depth && left > 0 ? load_up_to(row + half * kLanes, left) : zero();
            worst[half] = fma(x, zero(), worst[half]);
            store(to + half * kLanes, x);
          }
        }
      }
    }
    return any_nonfinite(worst[0] + worst[1]);
  }

  template <typename T>
  static bool pack_right(float* dst, const T* src, int64_t stride, int depth, int depth_pad,
                         int cols) {
    return pack_right<T>(dst, src, stride, depth, depth_pad, cols, depth_pad);
  }

  template <typename T>
  static void pack_right_transposed(float* dst, const T* src, int64_t stride, int cols, int depth,
                                    int depth_pad) {
    for (int c = 0; c < cols; c += kPanel, dst += static_cast<int64_t>(depth_pad) * kPanel) {
      for (int i = 0; i < kPanel; ++i) ask_for_row(src, stride, c + i, cols, depth);
      for (int part = 0; part < kPanel; part += kLanes) {
        for (int k = 0; k < depth_pad; k += kLanes) {
          Vec rows[kLanes];
          for (int i = 0; i < kLanes; ++i) {
            const int col = c + part + i;
            rows[i] =
                col < cols && k < depth ? load_up_to(src + col * stride + k, depth - k) : zero();
          }
          transpose_lanes(rows);
          for (int i = 0; i < kLanes && k + i < depth_pad; ++i) {
            store(dst + (k + i) * kPanel + part, rows[i]);
          }
        }
      }
    }
  }

  FOVEA_INLINE static void store_left(float* dst, int64_t ld, int row, int col, Vec x) {
    store(dst + row * ld + col, x);
  }
  FOVEA_INLINE static void store_left_two(float* dst, int64_t ld, int row, int col, Vec x, Vec y) {
    store(dst + row * ld + col, x);
    store(dst + row * ld + col + kLanes, y);
  }
  FOVEA_INLINE static void store_right(float* dst, int64_t depth_pad, int row, int col,
                                       const Vec (&x)[4]) {
    float* p = dst + (col / kPanel) * depth_pad * kPanel + row * kPanel + col % kPanel;
    for (int i = 0; i < 4; ++i) store(p + i * kPanel, x[i]);
  }

  FOVEA_INLINE static float right_at(const float* src, int64_t depth_pad, int row, int col) {
    return src[(col / kPanel) * depth_pad * kPanel + row * kPanel + col % kPanel];
  }

  template <bool kAccumulate, typename AnyLeft>
  static void multiply(float* c, int64_t ldc, int rows, int cols, int depth, AnyLeft a,
                       const float* b, int64_t b_depth_pad) {
    panels<kAccumulate>(c, ldc, kPanel, rows, cols, depth, a, b, b_depth_pad);
  }

  template <bool kAccumulate>
  static void multiply(float* c, int64_t ldc, int rows, int cols, int depth, Left a, const float* b,
                       int64_t b_depth_pad) {
    if (a.depth == 1) {
      multiply<kAccumulate>(c, ldc, rows, cols, depth, LeftByRows{a.data, a.row}, b, b_depth_pad);
    } else {
      multiply<kAccumulate>(c, ldc, rows, cols, depth, LeftByColumns{a.data, a.depth}, b,
                            b_depth_pad);
    }
  }

  static void multiply_to_right(float* c, int64_t c_depth_pad, int rows, int cols, int depth,
                                Left a, const float* b, int64_t b_depth_pad) {
    const int64_t panel = c_depth_pad * kPanel;
    if (a.depth == 1) {
      panels<false>(c, kPanel, panel, rows, cols, depth, LeftByRows{a.data, a.row}, b, b_depth_pad);
    } else {
      panels<false>(c, kPanel, panel, rows, cols, depth, LeftByColumns{a.data, a.depth}, b,
                    b_depth_pad);
    }
  }

 private:
  // Of up to kSliceRows of `rows`.
  template <typename T>
  FOVEA_INLINE static void slice_of_rows(float* dst, const T* src, int64_t row, int rows, int depth,
                                         int depth_pad) {
    for (int k = 0; k < depth_pad; k += kLanes) {
      Vec x[kLanes];
      for (int r = 0; r < kLanes; ++r) {
        const bool there = r < kSliceRows && r < rows && k < depth;
        x[r] = there ? load_up_to(src + r * row + k, depth - k) : zero();
      }
      transpose_lanes(x);
      for (int i = 0; i < kLanes && k + i < depth_pad; ++i) store(dst + (k + i) * kSliceRows, x[i]);
    }
  }

  // While `row` of `rows` is packed.
  template <typename T>
  FOVEA_INLINE static void ask_for_row(const T* src, int64_t stride, int row, int rows, int n) {
    if (kRowsAhead == 0 || row + kRowsAhead >= rows) return;
    prefetch_to_read(src + (row + kRowsAhead) * stride, n);
  }

  // c_panel: from kPanel columns of c to the next.
  template <bool kAccumulate, typename AnyLeft>
  FOVEA_INLINE static void panels(float* c, int64_t ldc, int64_t c_panel, int rows, int cols,
                                  int depth, AnyLeft a, const float* b, int64_t b_depth_pad) {
    constexpr int kMost = std::same_as<AnyLeft, LeftSlices> ? kSliceRows : kRowsAtOnce;
    // Rows for tiles of the most. One alone waits for its sums, so where six at a time would leave
    // two or three, fours come last.
    const int left = rows % kMost;
    const int tall = kMost == 6 && (left == 2 || left == 3) ? rows - kMost : rows;
    const float* const first = b;
    for (int n = 0; n < cols; n += kPanel, c += c_panel) {
      const float* const next = n + kPanel < cols ? b + b_depth_pad * kPanel : first;
      const float* ahead = next;  // of what slices ask for, tile after tile
      int m = 0;
      for (; m + kMost <= tall; m += kMost) {
        tile<kMost, kAccumulate>(c + m * ldc, ldc, depth, a.from_row(m), b, ahead);
      }
      if constexpr (kMost > 8) {
        for (; m + 8 <= rows; m += 8) {
          tile<8, kAccumulate>(c + m * ldc, ldc, depth, a.from_row(m), b, ahead);
        }
      }
      for (; m + 4 <= rows; m += 4) {
        tile<4, kAccumulate>(c + m * ldc, ldc, depth, a.from_row(m), b, ahead);
      }
      for (; m < rows; ++m) tile<1, kAccumulate>(c + m * ldc, ldc, depth, a.from_row(m), b, ahead);
      b = next;
    }
  }

  template <int kRows, bool kAccumulate, typename AnyLeft>
  FOVEA_INLINE static void tile(float* c, int64_t ldc, int depth, AnyLeft a, const float* b,
                                const float*& ahead) {
    TileSums<kRows> sums;
    for (int r = 0; r < kRows; ++r) sums[r][0] = sums[r][1] = zero();
    if constexpr (kFmaTakesALane || std::same_as<AnyLeft, LeftSlices>) {
      for (int r = 0; r < kRows; ++r) prefetch_to_write(c + r * ldc, kPanel);
    }
    if constexpr (std::same_as<AnyLeft, LeftSlices>) {
      add_products<kRows>(sums, depth, a, b, ahead);
    } else {
      add_products<kRows>(sums, depth, a, b);
    }
    // What was there is added last: a sum of sums rounds less than one long chain of additions.
    for (int r = 0; r < kRows; ++r) {
      for (int half = 0; half < 2; ++half) {
        float* const p = c + r * ldc + half * kLanes;
        store(p, kAccumulate ? load(p) + sums[r][half] : sums[r][half]);
      }
    }
  }
};

}  // namespace fovea::FOVEA_ISA
