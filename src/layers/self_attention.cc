// SelfAttention, GroupedQueryAttention and MultiQueryAttention: one projection of q, k and v.
#include <algorithm>

#include "api/guard.h"
#include "base/refusal.h"
#include "layers/heads.h"

namespace fovea {
namespace layers {
namespace {

class FusedLayer final : public LayerPlan<FusedWeights>::Impl {
 public:
  Status make(const GroupedQueryOptions& o, int64_t head_dim, const LayerShape& with, Device on,
              const PlanOptions& plan) {
    embed_ = o.embed_dim;
    sizes_ = {o.num_heads, o.num_kv_heads, head_dim};
    bias_ = o.bias;
    const int64_t widest = std::max(embed_, qkv_width());
    if (Status s = make_steps(with, o.dtype, o.max_seq_len, on, plan,
                              Heads::needs(o, with, head_dim, widest));
        !s.ok()) {
      return s;
    }
    make_scratch();
    lend(embed_, kOutput, kProjectBack);
    lend_weights(embed_, qkv_width(), out_width());
    qkv_ = memory.saved(dtype, {shape.batch, shape.q_len, qkv_width()}, {kProject, kAttend},
                        kAttendBack);
    if (Status s = heads_.make(*this, o, sizes_, plan); !s.ok()) return s;
    dqkv_ = memory.backward(dtype, {shape.batch, shape.q_len, qkv_width()},
                            {kAttendBack, kProjectBack});
    dheads_ =
        memory.backward(dtype, {shape.batch, shape.q_len, out_width()}, {kOutputBack, kAttendBack});
    return {};
  }

  RowDims query_dims() const override { return {shape.batch, shape.q_len, embed_}; }
  void check_inputs(CallCheck& check, const LayerInputs& in) const override {
    check_self_inputs(check, in, query_dims());
    heads_.check_inputs(check, *this, in);
  }
  void check_weights(CallCheck& check, CallCheck::Weights kind,
                     const FusedWeights& w) const override {
    const Dim qkv{"(num_heads + 2 num_kv_heads) * head_dim", qkv_width()};
    const Dim embed{"embed_dim", embed_}, heads{"num_heads * head_dim", out_width()};
    check.weight(kind, "qkv", w.qkv, {qkv, embed});
    check.weight(kind, "out", w.out, {embed, heads});
    check.bias(kind, bias_, "qkv_bias", w.qkv_bias, qkv);
    check.bias(kind, bias_, "out_bias", w.out_bias, embed);
    heads_.check_norm(check, kind, w.norm);
  }

  void forward(Run& run, const Memory& at, const LayerForward<FusedWeights>& call) const override {
    const TensorView qkv = at.at(qkv_);
    engine->linear(run, call.query, {call.weights.qkv, call.weights.qkv_bias}, qkv);
    const TensorView heads =
        heads_.forward(run, *this, at, call, call.weights.norm, split(qkv), call.cache);
    engine->linear(run, heads, {call.weights.out, call.weights.out_bias}, call.out);
  }

  void backward(Run& run, const Memory& own,
                const LayerBackward<FusedWeights>& call) const override {
    const FusedWeights& dw = call.dweights;
    const Memory at = own.with(Room::kDprojection, dw.qkv).with(Room::kDoutput, dw.out);
    const TensorView dheads = at.at(dheads_), dqkv = at.at(dqkv_);
    engine->linear_dx(run, call.dout, {call.weights.out}, dheads, Write::kSet);
    heads_.backward(run, *this, at, call, call.weights.norm, dw.norm, split(at.at(qkv_)), dheads,
                    split(dqkv));
    engine->linear_dw(run, dqkv, call.query, {dw.qkv, dw.qkv_bias});
    if (call.dquery.given()) {
      engine->linear_dx(run, dqkv, {call.weights.qkv}, call.dquery, Write::kSet);
    }
    engine->linear_dw(run, call.dout, heads_.output(at), {dw.out, dw.out_bias});
  }

  LayerCache cache_views() const override { return heads_.cache_views(*this); }

 private:
  int64_t out_width() const { return sizes_.heads * sizes_.dim; }
  int64_t qkv_width() const { return (sizes_.heads + 2 * sizes_.heads_kv) * sizes_.dim; }

  HeadTensors split(const TensorView& qkv) const {
    const int64_t kv = sizes_.heads_kv * sizes_.dim;
    return {as_heads(columns(qkv, 0, out_width()), sizes_.heads),
            as_heads(columns(qkv, out_width(), kv), sizes_.heads_kv),
            as_heads(columns(qkv, out_width() + kv, kv), sizes_.heads_kv)};
  }

  int64_t embed_ = 0;
  HeadSizes sizes_;
  bool bias_ = true;
  Heads heads_;
  Slot qkv_;            // saved; q and k as RoPE left them
  Slot dqkv_, dheads_;  // backward
};

Result<LayerPlan<FusedWeights>> make(const GroupedQueryOptions& o, const LayerShape& shape,
                                     Device device, const PlanOptions& plan) {
  OptionCheck check;
  check.common(o, shape);
  check.at_least("num_kv_heads", o.num_kv_heads, 1);
  if (check.ok()) check.multiple("num_heads", o.num_heads, "num_kv_heads", o.num_kv_heads);
  check.attends_to_itself(shape);
  const int64_t head_dim = head_dim_of(o, check);
  if (o.position == Position::kRope) check.rope(o.rope, head_dim);
  check.extent("weights.qkv", {3, o.num_heads, head_dim, o.embed_dim});
  check.extent("activations", {std::max<int64_t>(1, shape.batch),
                               std::max({int64_t{1}, shape.q_len, o.max_seq_len}), 3, o.num_heads,
                               std::max(head_dim, o.embed_dim)});
  if (!check.ok()) return check.status();
  return made_layer<FusedLayer>(o, head_dim, shape, device, plan);
}

}  // namespace
}  // namespace layers

Result<LayerPlan<FusedWeights>> make_layer(const GroupedQueryOptions& options,
                                           const LayerShape& shape, Device device,
                                           const PlanOptions& plan) {
  return guarded<Result<LayerPlan<FusedWeights>>>(
      [&] { return layers::make(options, shape, device, plan); });
}

Result<LayerPlan<FusedWeights>> make_layer(const SelfAttentionOptions& options,
                                           const LayerShape& shape, Device device,
                                           const PlanOptions& plan) {
  return make_layer(GroupedQueryOptions{options, options.num_heads, options.bias}, shape, device,
                    plan);
}

Result<LayerPlan<FusedWeights>> make_layer(const MultiQueryOptions& options,
                                           const LayerShape& shape, Device device,
                                           const PlanOptions& plan) {
  return make_layer(GroupedQueryOptions{options, 1, options.bias}, shape, device, plan);
}

}  // namespace fovea
