// LatentAttention: keys and values come from a latent, and the cache holds the latent.
#include <algorithm>
#include <cmath>

#include "api/guard.h"
#include "layers/latent_options.h"
#include "layers/layer.h"

namespace fovea {
namespace layers {
namespace {

class LatentLayer final : public LayerPlan<LatentWeights>::Impl {
 public:
  Status make(const LatentOptions& o, const LatentSizes& sizes, const LayerShape& with, Device on,
              const PlanOptions& plan) {
    s_ = sizes;
    norm_eps_ = o.norm_eps;
    rope_ = o.position == Position::kRope;
    absorbed_ = is_absorbed(o, sizes, with);
    if (Status s = make_steps(with, o.dtype, o.max_seq_len, on, plan, needs(o, with)); !s.ok()) {
      return s;
    }
    make_scratch();
    lend(s_.embed, kOutput, kProjectBack);
    lend_weights(s_.embed, s_.q_latent, s_.heads * s_.v);
    const AttendLives lives{{kAttend, kAttend}, {kAttendBack, kAttendBack}};
    Status attends = make_attend(problem(o), o.position, plan, lives);
    if (absorbed_ && o.decode == LatentDecode::kAuto &&
        attends.code() == StatusCode::kUnsupported) {  // heads as wide as the latent
      absorbed_ = false;
      attends = make_attend(problem(o), o.position, plan, lives);
    }
    if (!attends.ok()) return attends;
    const int64_t batch = shape.batch, q_len = shape.q_len;
    const int64_t keys = cached() ? max_seq_len : q_len;
    const auto latent = [&](int64_t width) {
      return memory.saved(dtype, {batch, q_len, width}, {}, kProjectBack);
    };
    const auto heads = [&](int64_t tokens, int64_t dim) {
      return memory.saved(dtype, {batch, tokens, s_.heads, dim}, {}, kAttendBack);
    };
    q_latent_ = latent(s_.q_latent);
    kv_latent_ = latent(latent_width());
    if (s_.deepseek) {
      q_latent_normed_ = latent(s_.q_latent);
      kv_latent_normed_ = latent(latent_width());
    }
    q_ = heads(q_len, s_.qk());
    if (absorbed_) {
      q_absorbed_ = memory.forward(dtype, {batch, q_len, s_.heads, latent_width()});
      out_absorbed_ = memory.forward(dtype, {batch, q_len, s_.heads, s_.kv_latent});
    } else {
      k_ = heads(keys, s_.qk());
      v_ = memory.saved(dtype, {batch, keys, s_.heads * s_.v}, {}, kAttendBack);
    }
    if (normed_heads()) {
      q_normed_ = heads(q_len, s_.qk());
      k_normed_ = heads(keys, s_.qk());
    }
    heads_out_ = memory.saved(dtype, {batch, q_len, s_.heads * s_.v}, {}, kOutputWeightBack);
    dheads_ = memory.backward(dtype, {batch, q_len, s_.heads * s_.v}, {kOutputBack, kAttendBack});
    const Life back{kAttendBack, kProjectBack}, last{kProjectBack, kProjectBack};
    dq_ = memory.backward(dtype, {batch, q_len, s_.heads, s_.qk()}, back);
    dk_ = memory.backward(dtype, {batch, q_len, s_.heads, s_.qk()}, back);
    dv_ = memory.backward(dtype, {batch, q_len, s_.heads * s_.v}, back);
    dq_latent_ = memory.backward(dtype, {batch, q_len, s_.q_latent}, last);
    dkv_latent_ = memory.backward(dtype, {batch, q_len, latent_width()}, last);
    return {};
  }

  RowDims query_dims() const override { return {shape.batch, shape.q_len, s_.embed}; }
  void check_inputs(CallCheck& check, const LayerInputs& in) const override {
    check_self_inputs(check, in, query_dims());
    if (cached() && rope_ && !s_.deepseek) {
      check.absent("position_ids", in.position_ids,
                   "keys are made again from the cache, where each stands at its own place");
    }
    check_self_positions(check, in, shape, s_.heads, cached() ? max_seq_len : shape.q_len);
  }
  void check_weights(CallCheck& check, CallCheck::Weights kind,
                     const LatentWeights& weights) const override {
    check_latent_weights(check, kind, s_, weights);
  }

  void forward(Run& run, const Memory& at, const LayerForward<LatentWeights>& call) const override {
    const int64_t past = call.cache != nullptr ? call.cache->length : 0;
    const RowPositions positions{call.position_ids, past};
    const TensorView q = make_q(run, at, call, positions);
    TensorView latent = make_latent(run, at, call, positions);  // [batch, rows, latent_width]
    if (call.cache != nullptr) {
      engine->copy(run, {{latent, as_rows(rows(call.cache->k, past, shape.q_len))}});
      latent = as_rows(rows(call.cache->k, 0, past + shape.q_len));
    }
    if (absorbed_) {
      attend_absorbed(run, at, call, q, *call.cache);
    } else {
      attend_expanded(run, at, call, q, latent);
    }
    engine->linear(run, at.at(heads_out_), {call.weights.out}, call.out);
  }

  void backward(Run& run, const Memory& own,
                const LayerBackward<LatentWeights>& call) const override {
    const LatentWeights& w = call.weights;
    const LatentWeights& dw = call.dweights;
    const Memory at = own.with(Room::kDprojection, dw.q_down).with(Room::kDoutput, dw.out);
    const RowPositions positions{call.position_ids, 0};
    const TensorView dheads = at.at(dheads_), dq = at.at(dq_), dk = at.at(dk_), dv = at.at(dv_);
    engine->linear_dx(run, call.dout, {w.out}, dheads, Write::kSet);
    const AttendTensors tensors{
        at.at(normed_heads() ? q_normed_ : q_), at.at(normed_heads() ? k_normed_ : k_),
        as_heads(at.at(v_), s_.heads), as_heads(at.at(heads_out_), s_.heads)};
    attend->backward(run, *engine, at, call, tensors,
                     {as_heads(dheads, s_.heads), dq, dk, as_heads(dv, s_.heads)});
    if (normed_heads()) {
      engine->normalise_backward(run, dq, at.at(q_), head_norm(w.norm.q, w.norm.q_bias), dq,
                                 dw.norm.q, dw.norm.q_bias);
      engine->normalise_backward(run, dk, at.at(k_), head_norm(w.norm.k, w.norm.k_bias), dk,
                                 dw.norm.k, dw.norm.k_bias);
    }
    if (rope_ && s_.deepseek) {
      engine->rotate(run, {{turning(dq), positions}}, Direction::kBackward);
    } else if (rope_) {
      engine->rotate(run, {{dq, positions}, {dk, positions}}, Direction::kBackward);
    }
    const TensorView dq_latent = q_backward(run, at, call);
    engine->linear_dw(run, dq_latent, call.query, {dw.q_down});
    const TensorView dlatent = latent_backward(run, at, call, positions);
    engine->linear_dw(run, dlatent, call.query, {dw.kv_down});
    if (call.dquery.given()) {
      engine->linear_dx(run, dlatent, {w.kv_down}, call.dquery, Write::kSet);
      engine->linear_dx(run, dq_latent, {w.q_down}, call.dquery, Write::kAdd);
    }
    engine->linear_dw(run, call.dout, at.at(heads_out_), {dw.out});
  }

  LayerCache cache_views() const override {
    LayerCache cache;
    cache.k = TensorView::contiguous(nullptr, dtype, {shape.batch, max_seq_len, 1, latent_width()});
    return cache;
  }

 private:
  int64_t latent_width() const { return s_.kv_latent + s_.rope; }
  bool normed_heads() const { return s_.qk_norm != QkNorm::kNone; }
  Norm head_norm(const TensorView& weight, const TensorView& bias) const {
    return {s_.qk_norm, norm_eps_, weight, bias};
  }
  Norm latent_norm(const TensorView& weight) const { return {QkNorm::kRms, norm_eps_, weight, {}}; }
  // The channels that RoPE turns: a head's last, or all of it.
  TensorView turning(const TensorView& heads) const {
    return s_.deepseek ? columns(heads, s_.nope, s_.rope) : heads;
  }

  EngineNeeds needs(const LatentOptions& o, const LayerShape& with) const {
    EngineNeeds n;
    n.head_dim = s_.qk();
    n.tf32 = o.tf32;
    n.sums = 2 * std::max({s_.qk(), s_.q_latent, s_.kv_latent});
    if (!rope_) return n;
    n.rope = o.rope;
    n.turning = turning_channels(o.rope, s_.deepseek ? s_.rope : s_.nope);
    n.positions = with.use == LayerUse::kCached ? o.max_seq_len : with.q_len;
    return n;
  }

  AttentionProblem problem(const LatentOptions& o) const {
    AttentionProblem p;
    p.batch = shape.batch;
    p.head_q = s_.heads;
    p.head_kv = absorbed_ ? 1 : s_.heads;
    p.q_len = shape.q_len;
    p.kv_len = cached() ? max_seq_len : shape.q_len;
    p.dim_qk = absorbed_ ? latent_width() : s_.qk();
    p.dim_v = absorbed_ ? s_.kv_latent : s_.v;
    p.dtype = dtype;
    p.mask = mask_of(o.causal, o.sliding_window);
    p.scale = o.softmax_scale.value_or(1 / std::sqrt(static_cast<double>(s_.qk())));
    p.dropout = o.dropout;
    p.tf32 = o.tf32;
    p.determinism = o.determinism;
    return p;
  }

  // [batch, q_len, heads, qk], ready for attention.
  TensorView make_q(Run& run, const Memory& at, const LayerForward<LatentWeights>& call,
                    const RowPositions& positions) const {
    const LatentWeights& w = call.weights;
    const TensorView q = at.at(q_);
    TensorView latent = at.at(q_latent_);
    engine->linear(run, call.query, {w.q_down}, latent);
    if (s_.deepseek) {
      const TensorView normed = at.at(q_latent_normed_);
      engine->normalise(run, as_heads(latent, 1), latent_norm(w.q_latent_norm),
                        as_heads(normed, 1));
      latent = normed;
    }
    engine->linear(run, latent, {w.q_up}, as_rows(q));
    if (rope_) engine->rotate(run, {{turning(q), positions}}, Direction::kForward);
    if (!normed_heads()) return q;
    const TensorView normed = at.at(q_normed_);
    engine->normalise(run, q, head_norm(w.norm.q, w.norm.q_bias), normed);
    return normed;
  }

  // [batch, q_len, latent_width] of this call's tokens, as the cache keeps it.
  TensorView make_latent(Run& run, const Memory& at, const LayerForward<LatentWeights>& call,
                         const RowPositions& positions) const {
    const TensorView latent = at.at(kv_latent_);
    engine->linear(run, call.query, {call.weights.kv_down}, latent);
    if (!s_.deepseek) return latent;
    const TensorView normed = at.at(kv_latent_normed_);
    engine->normalise(run, as_heads(columns(latent, 0, s_.kv_latent), 1),
                      latent_norm(call.weights.kv_latent_norm),
                      as_heads(columns(normed, 0, s_.kv_latent), 1));
    const TensorView shared = columns(normed, s_.kv_latent, s_.rope);
    engine->copy(run, {{columns(latent, s_.kv_latent, s_.rope), shared}});
    engine->rotate(run, {{as_heads(shared, 1), positions}}, Direction::kForward);
    return normed;
  }

  void attend_expanded(Run& run, const Memory& at, const LayerForward<LatentWeights>& call,
                       const TensorView& q, const TensorView& latent) const {
    const int64_t filled = latent.sizes[1];
    const TensorView c = columns(latent, 0, s_.kv_latent);
    const TensorView k = rows(at.at(k_), 0, filled), v = rows(at.at(v_), 0, filled);
    engine->head_linear(run, c, call.weights.k_up, LayerEngine::Block::kTransposed,
                        columns(k, 0, s_.nope));
    engine->linear(run, c, {call.weights.v_up}, v);
    if (s_.deepseek) {
      engine->copy(run, {{in_every_head(columns(latent, s_.kv_latent, s_.rope)), turning(k)}});
    } else if (rope_) {
      const bool whole = call.cache == nullptr;  // a cache's rows stand where they lie
      engine->rotate(run, {{k, {whole ? call.position_ids : TensorView{}, 0}}},
                     Direction::kForward);
    }
    Slot keys = k_;
    if (normed_heads()) {
      keys = k_normed_;
      engine->normalise(run, k, head_norm(call.weights.norm.k, call.weights.norm.k_bias),
                        rows(at.at(keys), 0, filled));
    }
    attend->forward(
        run, *engine, at, call,
        {q, at.at(keys), as_heads(at.at(v_), s_.heads), as_heads(at.at(heads_out_), s_.heads)},
        filled);
  }

  // q_h . (W_uk,h c) = (q_h W_uk,h) . c, and the same on the way out.
  void attend_absorbed(Run& run, const Memory& at, const LayerForward<LatentWeights>& call,
                       const TensorView& q, const LayerCache& cache) const {
    const TensorView absorbed = at.at(q_absorbed_), out = at.at(out_absorbed_);
    engine->head_linear(run, columns(q, 0, s_.nope), call.weights.k_up, LayerEngine::Block::kAsIs,
                        columns(absorbed, 0, s_.kv_latent));
    if (s_.rope > 0) {
      engine->copy(run, {{columns(q, s_.nope, s_.rope), columns(absorbed, s_.kv_latent, s_.rope)}});
    }
    attend->forward(run, *engine, at, call,
                    {absorbed, cache.k, columns(cache.k, 0, s_.kv_latent), out},
                    cache.length + shape.q_len);
    engine->head_linear(run, out, call.weights.v_up, LayerEngine::Block::kTransposed,
                        as_heads(at.at(heads_out_), s_.heads));
  }

  // From dk and dv, turned back where whole heads turn: the gradient of kv_down's output.
  TensorView latent_backward(Run& run, const Memory& at, const LayerBackward<LatentWeights>& call,
                             const RowPositions& positions) const {
    const LatentWeights& w = call.weights;
    const LatentWeights& dw = call.dweights;
    const TensorView latent = at.at(s_.deepseek ? kv_latent_normed_ : kv_latent_);
    const TensorView c = columns(latent, 0, s_.kv_latent);
    const TensorView dk = at.at(dk_), dv = at.at(dv_), dlatent = at.at(dkv_latent_);
    const TensorView dc = columns(dlatent, 0, s_.kv_latent);
    engine->linear_dw(run, dv, c, {dw.v_up});
    engine->linear_dx(run, dv, {w.v_up}, dc, Write::kSet);
    const TensorView dk_nope = nope_rows(run, at, dk);
    engine->linear_dw(run, dk_nope, c, {dw.k_up});
    engine->linear_dx(run, dk_nope, {w.k_up}, dc, Write::kAdd);
    if (!s_.deepseek) return dlatent;
    const TensorView dshared = columns(dlatent, s_.kv_latent, s_.rope);
    engine->sum_heads(run, turning(dk), dshared);
    engine->rotate(run, {{as_heads(dshared, 1), positions}}, Direction::kBackward);
    engine->normalise_backward(
        run, as_heads(dc, 1), as_heads(columns(at.at(kv_latent_), 0, s_.kv_latent), 1),
        latent_norm(w.kv_latent_norm), as_heads(dc, 1), dw.kv_latent_norm, {});
    return dlatent;
  }

  // The heads of dk without their turning channels, side by side: [batch, q_len, heads * nope].
  TensorView nope_rows(Run& run, const Memory& at, const TensorView& dk) const {
    if (!s_.deepseek) return as_rows(dk);
    const TensorView dense = TensorView::contiguous(
        at.at(dq_).data, dtype, {shape.batch, shape.q_len, s_.heads, s_.nope}, device);
    engine->copy(run, {{columns(dk, 0, s_.nope), dense}});  // dq has been passed on by now
    return as_rows(dense);
  }

  TensorView q_backward(Run& run, const Memory& at,
                        const LayerBackward<LatentWeights>& call) const {
    const TensorView dq = as_rows(at.at(dq_)), dlatent = at.at(dq_latent_);
    engine->linear_dw(run, dq, at.at(s_.deepseek ? q_latent_normed_ : q_latent_),
                      {call.dweights.q_up});
    engine->linear_dx(run, dq, {call.weights.q_up}, dlatent, Write::kSet);
    if (s_.deepseek) {
      engine->normalise_backward(run, as_heads(dlatent, 1), as_heads(at.at(q_latent_), 1),
                                 latent_norm(call.weights.q_latent_norm), as_heads(dlatent, 1),
                                 call.dweights.q_latent_norm, {});
    }
    return dlatent;
  }

  // [batch, rows, dim] seen by all heads.
  TensorView in_every_head(const TensorView& t) const {
    TensorView view = as_heads(t, 1);
    view.sizes[2] = s_.heads;
    view.strides[2] = 0;
    return view;
  }

  LatentSizes s_;
  double norm_eps_ = 0;
  bool rope_ = false, absorbed_ = false;
  Slot q_latent_, q_latent_normed_, q_, q_normed_;       // saved
  Slot kv_latent_, kv_latent_normed_;                    // saved
  Slot k_, k_normed_, v_, heads_out_;                    // saved
  Slot q_absorbed_, out_absorbed_;                       // forward
  Slot dheads_, dq_, dk_, dv_, dq_latent_, dkv_latent_;  // backward
};

Result<LayerPlan<LatentWeights>> make(const LatentOptions& options, const LayerShape& shape,
                                      Device device, const PlanOptions& plan) {
  OptionCheck check;
  const LatentSizes sizes = latent_sizes(options, shape, check);
  if (!check.ok()) return check.status();
  return made_layer<LatentLayer>(options, sizes, shape, device, plan);
}

}  // namespace
}  // namespace layers

Result<LayerPlan<LatentWeights>> make_layer(const LatentOptions& options, const LayerShape& shape,
                                            Device device, const PlanOptions& plan) {
  return guarded<Result<LayerPlan<LatentWeights>>>(
      [&] { return layers::make(options, shape, device, plan); });
}

}  // namespace fovea
