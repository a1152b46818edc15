// One batch member of a problem, dense or packed: where its rows begin and how many there are; and
// which keys a position may see. Shared by the host engines.
#pragma once

#include <algorithm>
#include <cmath>

#include "fovea/attention.h"

namespace fovea {

struct Sequence {
  int64_t q_len = 0;
  int64_t kv_len = 0;  // its own key length: positions align at this end
  int64_t q_row = 0;   // packed: first row in q; dense: 0, the batch stride selects
  int64_t kv_row = 0;
  int64_t batch_at = 0;  // index to apply to the batch stride: b when dense, 0 when packed
};

inline Sequence sequence_at(const AttentionProblem& p, const AttentionInputs& t, int64_t b) {
  if (p.layout == Layout::kPacked) {
    const auto* cu_q = static_cast<const int32_t*>(t.cu_seqlens_q.data);
    const auto* cu_kv = static_cast<const int32_t*>(t.cu_seqlens_kv.data);
    return {cu_q[b + 1] - cu_q[b], cu_kv[b + 1] - cu_kv[b], cu_q[b], cu_kv[b], 0};
  }
  int64_t kv_len = p.kv_len;
  if (has(p.features, Feature::kKeyLengths)) {
    kv_len = static_cast<const int32_t*>(t.key_lengths.data)[b * t.key_lengths.strides[0]];
  }
  return {p.q_len, kv_len, 0, 0, b};
}

// Strides of a [batch, row, head, dim] tensor, or of its packed form [row, head, dim].
struct RowStrides {
  int64_t batch = 0;
  int64_t row = 0;
  int64_t head = 0;
};

inline RowStrides row_strides(const TensorView& t) {
  if (t.rank == 3) return {0, t.strides[0], t.strides[1]};
  return {t.strides[0], t.strides[1], t.strides[2]};
}

// Whether products may take their factors as tf32, which is for f32 problems alone.
inline bool takes_tf32(const AttentionProblem& p) {
  return p.dtype == DType::kF32 && p.tf32 == Tf32::kAllowed;
}

inline double scale_of(const AttentionProblem& p) {
  return p.scale.value_or(1.0 / std::sqrt(static_cast<double>(p.dim_qk)));
}

// Keys [begin, end) that a position's window reaches, before the prefix is added.
struct KeyRange {
  int64_t begin = 0;
  int64_t end = 0;
};

inline KeyRange window_keys(const Mask& mask, int64_t position, int64_t kv_len) {
  KeyRange range{0, kv_len};
  if (mask.left != Mask::kUnbounded) range.begin = std::max<int64_t>(0, position - mask.left);
  if (mask.right != Mask::kUnbounded) range.end = std::min(kv_len, position + mask.right + 1);
  if (range.end < range.begin) range.end = range.begin;
  return range;
}

inline bool position_sees(const Mask& mask, int64_t position, int64_t key) {
  if (key < mask.prefix) return true;
  return (mask.left == Mask::kUnbounded || key >= position - mask.left) &&
         (mask.right == Mask::kUnbounded || key <= position + mask.right);
}

}  // namespace fovea
