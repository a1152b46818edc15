// Resolution of a call's tensors.
#include "backend/cuda/common/call.h"

#include "backend/cuda/common/alignment.h"
#include "backend/sequence.h"
#include "base/philox.h"

namespace fovea::cuda {
namespace {

// Whether 1 / scale, which a bias is multiplied by, can be the sum of two values of its dtype.
bool holds_inverse(const AttentionProblem& p) {
  return p.dtype != DType::kF16 || (scale_of(p) > 0x1p-15 && scale_of(p) < 0x1p8);
}

}  // namespace

Broadcast broadcast_of(const TensorView& t) {
  const auto stride = [&](size_t d) { return t.sizes[d] == 1 ? 0 : t.strides[d]; };
  return {t.data, stride(0), stride(1), stride(2)};
}

Rows rows_of(const TensorView& t) {
  const RowStrides s = row_strides(t);
  return {t.data, s.batch, s.row, s.head};
}

RowScalars scalars_of(const TensorView& t) {
  if (!t.given()) return {};
  auto* const data = static_cast<float*>(t.data);
  if (t.rank == 2) return {data, 0, t.strides[0], t.strides[1]};
  return {data, t.strides[0], t.strides[1], t.strides[2]};
}

bool takes_vectors(const TensorView& t) { return rows_are_whole(t, 16 / dtype_bytes(t.dtype)); }

Problem problem_of(const AttentionProblem& p, const AttentionInputs& t) {
  Problem out{};
  out.head_q = static_cast<int>(p.head_q);
  out.head_kv = static_cast<int>(p.head_kv);
  out.group = static_cast<int>(p.head_q / p.head_kv);
  out.q_len = static_cast<int>(p.q_len);
  out.kv_len = static_cast<int>(p.kv_len);
  out.dim_qk = static_cast<int>(p.dim_qk);
  out.dim_v = static_cast<int>(p.dim_v);
  out.left = static_cast<int>(p.mask.left);
  out.right = static_cast<int>(p.mask.right);
  out.prefix = static_cast<int>(p.mask.prefix);
  out.scale = static_cast<float>(scale_of(p));
  out.softcap = static_cast<float>(p.softcap);
  out.inverse_scale = static_cast<float>(1 / scale_of(p));
  if (p.softcap > 0) out.scale_of_cap = static_cast<float>(scale_of(p) / p.softcap);
  if (p.layout == Layout::kPacked) {
    out.cu_q = static_cast<const int*>(t.cu_seqlens_q.data);
    out.cu_kv = static_cast<const int*>(t.cu_seqlens_kv.data);
    out.total_q = static_cast<int>(p.total_q);
    out.total_kv = static_cast<int>(p.total_kv);
  }
  if (has(p.features, Feature::kKeyLengths)) {
    out.key_lengths = static_cast<const int*>(t.key_lengths.data);
    out.key_length_stride = t.key_lengths.sizes[0] > 1 ? t.key_lengths.strides[0] : 0;
  }
  if (has(p.features, Feature::kBias)) {
    out.bias = broadcast_of(t.bias);
    out.bias_is_f32 = t.bias.dtype == DType::kF32;
    out.bias_pairs = rows_begin_on(t.bias, 2);
    out.term_runs = t.bias.dtype == p.dtype && rows_begin_on(t.bias, 8) && holds_inverse(p);
  }
  if (has(p.features, Feature::kBoolMask)) {
    out.bool_mask = broadcast_of(t.mask);
    out.mask_pairs = rows_begin_on(t.mask, 2);
    out.term_runs = rows_begin_on(t.mask, 8);
  }
  if (has(p.features, Feature::kAlibi)) {
    const TensorView& slopes = t.alibi_slopes;
    out.alibi = static_cast<const float*>(slopes.data);
    out.alibi_batch = slopes.rank == 2 ? slopes.strides[0] : 0;
    out.alibi_head = slopes.strides[static_cast<size_t>(slopes.rank - 1)];
  }
  if (has(p.features, Feature::kSink)) {
    out.sink = static_cast<const float*>(t.sink.data);
    out.sink_head = t.sink.strides[0];
  }
  if (p.dropout > 0) {
    const PhiloxKey key = dropout_key(t.dropout.seed, t.dropout.offset);
    out.drop_threshold = dropout_threshold(p.dropout);
    out.drop_key0 = key.k0;
    out.drop_key1 = key.k1;
    out.drop_offset = static_cast<uint32_t>(t.dropout.offset);
    out.keep_scale = static_cast<float>(1 / (1 - p.dropout));
  }
  return out;
}

}  // namespace fovea::cuda
