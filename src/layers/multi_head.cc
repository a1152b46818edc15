// MultiHeadAttention: projections of query, key and value apart, which may be three tensors.
#include <algorithm>

#include "api/guard.h"
#include "base/refusal.h"
#include "layers/heads.h"

namespace fovea {
namespace layers {
namespace {

class MultiHeadLayer final : public LayerPlan<MultiHeadWeights>::Impl {
 public:
  Status make(const MultiHeadOptions& o, int64_t head_dim, const LayerShape& with, Device on,
              const PlanOptions& plan) {
    embed_ = o.embed_dim;
    kdim_ = o.kdim > 0 ? o.kdim : embed_;
    vdim_ = o.vdim > 0 ? o.vdim : embed_;
    heads_count_ = o.num_heads;
    width_ = o.num_heads * head_dim;
    bias_ = o.bias;
    if (Status s = make_steps(with, o.dtype, o.max_seq_len, on, plan,
                              Heads::needs(o, with, head_dim, std::max(embed_, width_)));
        !s.ok()) {
      return s;
    }
    make_scratch();
    lend(embed_, kOutput, kProjectBack);
    lend_weights(embed_, width_, width_);
    const Life life{kProject, kAttend};
    q_ = memory.saved(dtype, {shape.batch, shape.q_len, width_}, life, kAttendBack);
    k_ = memory.saved(dtype, {shape.batch, shape.kv_len, width_}, life, kAttendBack);
    v_ = memory.saved(dtype, {shape.batch, shape.kv_len, width_}, life, kAttendBack);
    if (Status s = heads_.make(*this, o, {o.num_heads, o.num_heads, head_dim}, plan); !s.ok()) {
      return s;
    }
    const Life back{kAttendBack, kProjectBack};
    dq_ = memory.backward(dtype, {shape.batch, shape.q_len, width_}, back);
    dk_ = memory.backward(dtype, {shape.batch, shape.kv_len, width_}, back);
    dv_ = memory.backward(dtype, {shape.batch, shape.kv_len, width_}, back);
    dheads_ =
        memory.backward(dtype, {shape.batch, shape.q_len, width_}, {kOutputBack, kAttendBack});
    return {};
  }

  RowDims query_dims() const override { return {shape.batch, shape.q_len, embed_}; }
  void check_inputs(CallCheck& check, const LayerInputs& in) const override {
    check.input("query", in.query, query_dims());
    check.input(in.key.given() ? "key" : "key (= query)", key_of(in), key_dims());
    check.input(in.value.given() ? "value" : "value (= key)", value_of(in), value_dims());
    heads_.check_inputs(check, *this, in);
  }
  void check_input_gradients(CallCheck& check,
                             const LayerBackward<MultiHeadWeights>& call) const override {
    if (call.key.given()) {
      check.optional_output("dkey", call.dkey, key_dims());
    } else {
      check.absent("dkey", call.dkey, "key is not: its gradient is in dquery");
    }
    if (call.value.given()) {
      check.optional_output("dvalue", call.dvalue, value_dims());
    } else {
      check.absent("dvalue", call.dvalue, "value is not: its gradient is with key's");
    }
  }
  void check_weights(CallCheck& check, CallCheck::Weights kind,
                     const MultiHeadWeights& w) const override {
    const Dim heads{"num_heads * head_dim", width_}, embed{"embed_dim", embed_};
    check.weight(kind, "q", w.q, {heads, embed});
    check.weight(kind, "k", w.k, {heads, {"kdim", kdim_}});
    check.weight(kind, "v", w.v, {heads, {"vdim", vdim_}});
    check.weight(kind, "out", w.out, {embed, heads});
    check.bias(kind, bias_, "q_bias", w.q_bias, heads);
    check.bias(kind, bias_, "k_bias", w.k_bias, heads);
    check.bias(kind, bias_, "v_bias", w.v_bias, heads);
    check.bias(kind, bias_, "out_bias", w.out_bias, embed);
    heads_.check_norm(check, kind, w.norm);
  }

  void forward(Run& run, const Memory& at,
               const LayerForward<MultiHeadWeights>& call) const override {
    const MultiHeadWeights& w = call.weights;
    engine->linear(run, call.query, {w.q, w.q_bias}, at.at(q_));
    engine->linear(run, key_of(call), {w.k, w.k_bias}, at.at(k_));
    engine->linear(run, value_of(call), {w.v, w.v_bias}, at.at(v_));
    const TensorView heads =
        heads_.forward(run, *this, at, call, w.norm, in_heads(at, q_, k_, v_), call.cache);
    engine->linear(run, heads, {w.out, w.out_bias}, call.out);
  }

  void backward(Run& run, const Memory& own,
                const LayerBackward<MultiHeadWeights>& call) const override {
    const MultiHeadWeights& w = call.weights;
    const MultiHeadWeights& dw = call.dweights;
    const Memory at = own.with(Room::kDprojection, dw.q).with(Room::kDoutput, dw.out);
    const TensorView dheads = at.at(dheads_);
    engine->linear_dx(run, call.dout, {w.out}, dheads, Write::kSet);
    heads_.backward(run, *this, at, call, w.norm, dw.norm, in_heads(at, q_, k_, v_), dheads,
                    in_heads(at, dq_, dk_, dv_));
    engine->linear_dw(run, at.at(dq_), call.query, {dw.q, dw.q_bias});
    engine->linear_dw(run, at.at(dk_), key_of(call), {dw.k, dw.k_bias});
    engine->linear_dw(run, at.at(dv_), value_of(call), {dw.v, dw.v_bias});
    // A tensor that was not given shares the gradient of the one that stood in for it.
    const TensorView& dkey = call.key.given() ? call.dkey : call.dquery;
    const TensorView& dvalue = call.value.given() ? call.dvalue : dkey;
    if (call.dquery.given()) engine->linear_dx(run, at.at(dq_), {w.q}, call.dquery, Write::kSet);
    if (dkey.given()) {
      engine->linear_dx(run, at.at(dk_), {w.k}, dkey, call.key.given() ? Write::kSet : Write::kAdd);
    }
    if (dvalue.given()) {
      engine->linear_dx(run, at.at(dv_), {w.v}, dvalue,
                        call.value.given() ? Write::kSet : Write::kAdd);
    }
    engine->linear_dw(run, call.dout, heads_.output(at), {dw.out, dw.out_bias});
  }

  LayerCache cache_views() const override { return heads_.cache_views(*this); }

 private:
  static const TensorView& key_of(const LayerInputs& in) {
    return in.key.given() ? in.key : in.query;
  }
  static const TensorView& value_of(const LayerInputs& in) {
    return in.value.given() ? in.value : key_of(in);
  }

  HeadTensors in_heads(const Memory& at, const Slot& q, const Slot& k, const Slot& v) const {
    return {as_heads(at.at(q), heads_count_), as_heads(at.at(k), heads_count_),
            as_heads(at.at(v), heads_count_)};
  }

  RowDims key_dims() const { return {shape.batch, shape.kv_len, kdim_, "kv_len", "kdim"}; }
  RowDims value_dims() const { return {shape.batch, shape.kv_len, vdim_, "kv_len", "vdim"}; }

  int64_t embed_ = 0, kdim_ = 0, vdim_ = 0;
  int64_t heads_count_ = 0, width_ = 0;
  bool bias_ = true;
  Heads heads_;
  Slot q_, k_, v_;              // saved; q and k as RoPE left them
  Slot dq_, dk_, dv_, dheads_;  // backward
};

Result<LayerPlan<MultiHeadWeights>> make(const MultiHeadOptions& o, const LayerShape& shape,
                                         Device device, const PlanOptions& plan) {
  OptionCheck check;
  check.common(o, shape);
  check.at_least("kdim", o.kdim, 0);
  check.at_least("vdim", o.vdim, 0);
  const int64_t head_dim = head_dim_of(o, check);
  if (o.position == Position::kRope) check.rope(o.rope, head_dim);
  const int64_t widest = std::max({o.embed_dim, o.kdim, o.vdim});
  check.extent("weights", {o.num_heads, head_dim, widest});
  check.extent("activations", {std::max<int64_t>(1, shape.batch),
                               std::max({int64_t{1}, shape.q_len, shape.kv_len, o.max_seq_len}), 3,
                               o.num_heads, std::max(head_dim, widest)});
  if (!check.ok()) return check.status();
  return made_layer<MultiHeadLayer>(o, head_dim, shape, device, plan);
}

}  // namespace
}  // namespace layers

Result<LayerPlan<MultiHeadWeights>> make_layer(const MultiHeadOptions& options,
                                               const LayerShape& shape, Device device,
                                               const PlanOptions& plan) {
  return guarded<Result<LayerPlan<MultiHeadWeights>>>(
      [&] { return layers::make(options, shape, device, plan); });
}

}  // namespace fovea
