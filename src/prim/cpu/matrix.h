// What the engine asks of a class that multiplies blocks: c (+)= a b, with c in float, row-major.
//
// Each class chooses how its operands lie in memory. A left operand (rows x depth) is named by a
// pointer and a leading dimension ld, at least the padded depth: operand row r * ld is where row r
// begins when r is a multiple of kTileQ. A right operand (depth x columns) is panels of kPanel
// columns, one after another, each holding all of its padded depth: column c begins at c *
// depth_pad when c is a multiple of kColumnAlign, and depth k begins k * kPanel into a panel when k
// is a multiple of kDepthAlign.
//
// Sizes given to multiply are true for rows, multiples of kColumnAlign for columns and of
// kDepthAlign for depth; operands are padded with zeros along the depth. Rows of a left operand up
// to the next multiple of kRowAlign may hold anything, and those of c are written over.
#pragma once

#include <concepts>

#include "prim/cpu/simd_math.h"

namespace fovea::FOVEA_ISA {

// M multiplies blocks packed from tensors of T.
template <typename M, typename T>
concept Matrix = requires(typename M::Elem* dst, const typename M::Elem* packed, const T* src,
                          float* c, int64_t stride, int n, Vec x, const Vec (&four)[4],
                          typename M::Left left) {
  { M::kName } -> std::convertible_to<const char*>;  // type the products run in
  { M::kExp2 } -> std::convertible_to<Exp2>;         // how exact weights must be
  requires M::kPanel >
  0 && M::kColumnAlign % M::kPanel == 0;
  requires M::kColumnAlign % M::kDepthAlign == 0;  // keys are columns once, depth once
  requires M::kColumnAlign % (2 * kLanes) == 0;    // softmax takes two vectors at a time
  requires M::kDepthAlign % 4 == 0;                // store_right stores four rows
  requires 32 % M::kRowAlign == 0;                 // what the engine pads rows to
  // The engine's blocking, chosen for this class's speed.
  requires M::kTileQ % M::kRowAlign == 0 && M::kTileKv % M::kColumnAlign == 0;
  // Rows of the tiles that a mask cuts: fewer, to waste less along its edge.
  requires M::kTileQ % M::kCutTileQ == 0;
  requires M::kBackwardTileQ % M::kBackwardCutTileQ == 0;
  requires M::kBackwardCutTileQ == M::kBackwardTileQ || M::kTransposedLeftIsAView;
  requires M::kBackwardTileQ % M::kRowAlign == 0 && M::kBackwardTileQ % M::kDepthAlign == 0;
  requires M::kBackwardTileKv % M::kColumnAlign == 0;
  requires M::kRowsPerTask >
  0 && M::kStreamRows > 0;
  // A left operand read with rows and depth exchanged: as M::transposed(left), or else packed by
  // pack_left_transposed.
  { M::kTransposedLeftIsAView } -> std::convertible_to<bool>;
  // Whether a left operand of Elem is its rows as they lie, with no packing needed.
  { M::kLeftIsRows } -> std::convertible_to<bool>;
  // Whether there is a second kind of left operand for large products, slices: M::slices(packed,
  // depth_pad), packed by pack_left_slices(dst, src, row, along, rows, depth, depth_pad) into
  // slices_size(rows, depth_pad) elements.
  { M::kLeftIsSliced } -> std::convertible_to<bool>;
  // Whether the forward pass turns scores to weights slot by slot, kSlotColumns at a time: for
  // products so fast that moving scores counts. Such a class also has store_left_two.
  { M::kOnePass } -> std::convertible_to<bool>;

  // Whether products are of the type that products take. Such a class also has multiply_to_right,
  // whose c is a right operand (c, c_depth_pad, rows, cols, depth, a, b, b_depth_pad), and
  // left_of_right(packed, depth_pad, n), a right operand as a left one from depth n on.
  { M::kProductsAreOperands } -> std::convertible_to<bool>;

  // Around all products of a task, on its thread: state of the CPU that they need.
  M::begin();
  M::end();

  // A left operand as multiply takes it, from its beginning or from a depth (a multiple of
  // kColumnAlign).
  { M::left(packed, stride) } -> std::same_as<typename M::Left>;
  { M::left_from(packed, stride, n) } -> std::same_as<typename M::Left>;

  // (dst, ld, row, src, depth, depth_pad): one row, zeros from depth to depth_pad.
  M::pack_left_row(dst, stride, n, src, n, n);
  // (dst, ld, src, stride, rows, cols, rows_pad, cols_pad): dst[c][r] = src[r][c], zeros to the
  // padded sizes, cols_pad a multiple of 32.
  M::template pack_left_transposed<T>(dst, stride, src, stride, n, n, n, n);
  // (dst, src, stride, depth, depth_pad, cols): row k of src is depth k; zeros after depth and
  // after cols. True when src holds NaN or Inf.
  { M::template pack_right<T>(dst, src, stride, n, n, n) } -> std::same_as<bool>;
  // (dst, src, stride, cols, depth, depth_pad): row c of src is column c.
  M::template pack_right_transposed<T>(dst, src, stride, n, n, n);

  // (dst, ld, row, col, x): kLanes elements of a row of a left operand.
  M::store_left(dst, stride, n, n, x);
  // (dst, depth_pad, row, col, x): kLanes columns of rows row..row + 3 of a right operand.
  M::store_right(dst, stride, n, n, four);
  { M::right_at(packed, stride, n, n) } -> std::same_as<float>;  // (src, depth_pad, row, col)

  // (c, ldc, rows, cols, depth, a, b, b_depth_pad): c = a b, or c += a b.
  M::template multiply<false>(c, stride, n, n, n, left, packed, stride);
  M::template multiply<true>(c, stride, n, n, n, left, packed, stride);
};

}  // namespace fovea::FOVEA_ISA
