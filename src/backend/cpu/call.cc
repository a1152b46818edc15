// Tensors to plain arguments.
#include "backend/cpu/call.h"

namespace fovea::cpu {
namespace {

Rows rows_of(const TensorView& t) { return {t.data, row_strides(t)}; }

void add_inputs(const AttentionProblem& p, const AttentionInputs& t, Arguments& a) {
  a.q = rows_of(t.q);
  a.k = rows_of(t.k);
  a.v = rows_of(t.v);
  if (p.dropout > 0) {
    a.drop_key = dropout_key(t.dropout.seed, t.dropout.offset);
    a.drop_offset = static_cast<uint32_t>(t.dropout.offset);
  }
  if (has(p.features, Feature::kBias)) {
    a.bias = broadcast_strides(t.bias);
    a.bias_type = t.bias.dtype == DType::kF32 ? BiasType::kF32 : BiasType::kLikeProblem;
  }
  if (has(p.features, Feature::kBoolMask)) a.bool_mask = broadcast_strides(t.mask);
  if (has(p.features, Feature::kAlibi)) {
    a.alibi = static_cast<const float*>(t.alibi_slopes.data);
    a.alibi_batch = t.alibi_slopes.rank == 2 ? t.alibi_slopes.strides[0] : 0;
    a.alibi_head = t.alibi_slopes.strides[t.alibi_slopes.rank == 2 ? 1 : 0];
  }
  if (has(p.features, Feature::kSink)) {
    a.sink = static_cast<const float*>(t.sink.data);
    a.sink_head = t.sink.strides[0];
  }
}

}  // namespace

RowScalars row_scalars(const TensorView& t) {
  if (!t.given()) return {};
  auto* const data = static_cast<float*>(t.data);
  if (t.rank == 2) return {data, 0, t.strides[0], t.strides[1]};
  return {data, t.strides[0], t.strides[1], t.strides[2]};
}

Broadcast broadcast_strides(const TensorView& t) {
  const auto stride = [&](size_t dim) { return t.sizes[dim] == 1 ? 0 : t.strides[dim]; };
  return {t.data, stride(0), stride(1), stride(2)};
}

Arguments arguments_of(const AttentionProblem& p) {
  Arguments a;
  a.head_q = p.head_q;
  a.head_kv = p.head_kv;
  a.group = p.head_q / p.head_kv;
  a.dim_qk = static_cast<int>(p.dim_qk);
  a.dim_v = static_cast<int>(p.dim_v);
  a.mask = p.mask;
  a.scale = static_cast<float>(scale_of(p));
  a.softcap = static_cast<float>(p.softcap);
  if (p.dropout > 0) {
    a.drop_threshold = dropout_threshold(p.dropout);
    a.keep_scale = static_cast<float>(1 / (1 - p.dropout));
  }
  return a;
}

Arguments arguments_of(const AttentionProblem& p, const ForwardTensors& t) {
  Arguments a = arguments_of(p);
  add_inputs(p, t, a);
  a.out = rows_of(t.out);
  a.lse = row_scalars(t.lse);
  return a;
}

Arguments arguments_of(const AttentionProblem& p, const BackwardTensors& t) {
  Arguments a = arguments_of(p);
  add_inputs(p, t, a);
  a.out = rows_of(t.out);
  a.lse = row_scalars(t.lse);
  a.dout = rows_of(t.dout);
  a.dlse = row_scalars(t.dlse);
  a.dq = rows_of(t.dq);
  a.dk = rows_of(t.dk);
  a.dv = rows_of(t.dv);
  return a;
}

}  // namespace fovea::cpu
