// Query rows of a call: where row i of head h lies in q, out, lse and their gradients.
#pragma once

#include "backend/reference/head_rows.h"

namespace fovea::reference {

// First element of row (h, i) in a tensor shaped like q or out.
inline int64_t query_row(const TensorView& t, const Sequence& s, int64_t h, int64_t i) {
  const RowStrides strides = row_strides(t);
  return s.batch_at * strides.batch + (s.q_row + i) * strides.row + h * strides.head;
}

// First element of row (head_kv, j) in a tensor shaped like k or v.
inline int64_t key_row(const TensorView& t, const Sequence& s, int64_t head_kv, int64_t j) {
  const RowStrides strides = row_strides(t);
  return s.batch_at * strides.batch + (s.kv_row + j) * strides.row + head_kv * strides.head;
}

// Element (h, i) of a tensor shaped like lse: [batch, head_q, q_len], packed [head_q, total_q].
inline int64_t lse_element(const TensorView& t, const Sequence& s, int64_t h, int64_t i) {
  if (t.rank == 2) return h * t.strides[0] + (s.q_row + i) * t.strides[1];
  return s.batch_at * t.strides[0] + h * t.strides[1] + i * t.strides[2];
}

// delta = sum_d dout * out - dlse, for dout and out of one row. Summed in lanes as a reduction is,
// not term by term as a matrix product: in the plain formula dout . v and delta must not round
// alike, or a row with one key would cancel to an exact zero that no fused engine can promise.
template <typename Real>
Real delta_of(const BackwardTensors& t, const Sequence& s, int64_t h, int64_t i, int64_t dim_v,
              const Real* dout, const Real* out) {
  Real lanes[4] = {};
  for (int64_t d = 0; d < dim_v; ++d) lanes[d % 4] += dout[d] * out[d];
  Real delta = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
  if (t.dlse.given()) delta -= load_one<Real>(t.dlse, lse_element(t.dlse, s, h, i));
  return delta;
}

}  // namespace fovea::reference
