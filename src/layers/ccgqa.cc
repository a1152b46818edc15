// CCGQA: one projection, the prologue, attention, one projection.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "api/guard.h"
#include "base/refusal.h"
#include "layers/ccgqa_scratch.h"
#include "layers/ccgqa_weights.h"

namespace fovea {
namespace layers {
namespace {

namespace forth = ccgqa_forward;
namespace back = ccgqa_backward;

class CcgqaLayer final : public LayerPlan<CcgqaWeights>::Impl {
 public:
  Status make(const CcgqaOptions& options, const LayerShape& with, Device on,
              const PlanOptions& plan) {
    o_ = options;
    reach_ = o_.convs ? o_.conv_taps[0] + o_.conv_taps[1] - 2 : 0;
    lead_ = std::max<int64_t>(reach_, o_.value_shift ? 1 : 0);
    const Position position = o_.rope ? Position::kRope : Position::kNone;
    if (Status s = make_steps(with, o_.dtype, o_.max_seq_len, on, plan, needs(with)); !s.ok()) {
      return s;
    }
    const int64_t batch = shape.batch, q_len = shape.q_len;
    z_ = memory.saved(dtype, {batch, lead_ + q_len, qk_width() + v_width()},
                      {forth::kProject, forth::kPrologue}, back::kFirst);
    // Side by side what backward has done with before the others: together they are room for dz.
    make_mixed();
    // Where attention and its output are one step, what it reads must not lie where it writes.
    at_once_ = attends_at_once(plan);
    const Life of_heads{forth::kPrologue, at_once_ ? forth::kOutput : forth::kAttend};
    qk_ = memory.saved(dtype, {batch, q_len, qk_width()}, of_heads, back::kTokens);
    v_ = memory.saved(dtype, {batch, q_len, v_width()}, of_heads, back::kAttend);
    const AttendLives lives{{forth::kAttend, forth::kAttend}, {back::kAttend, back::kAttend}};
    if (Status s = make_attend(problem(), position, plan, lives); !s.ok()) return s;
    if (o_.convs) make_u();
    heads_out_ = memory.saved(dtype, {batch, q_len, q_width()}, {forth::kAttend, forth::kOutput},
                              output_weight_until(*engine, prologue({}, {}, {}, 0)));
    make_gradients();
    lend_results();
    const TensorView x = TensorView::contiguous(nullptr, dtype, {batch, q_len, o_.embed_dim});
    return scratch_.make(*this, x, heads_out_.view, rows(z_.view, lead_, q_len), dz_.view,
                         prologue({}, {}, {}, 0));
  }

  RowDims query_dims() const override { return {shape.batch, shape.q_len, o_.embed_dim}; }
  void check_inputs(CallCheck& check, const LayerInputs& in) const override {
    check_self_inputs(check, in, query_dims());
    check_self_positions(check, in, shape, o_.num_heads, cached() ? max_seq_len : shape.q_len);
  }
  void check_weights(CallCheck& check, CallCheck::Weights kind,
                     const CcgqaWeights& weights) const override {
    check_ccgqa_weights(check, kind, o_, weights);
  }

  void forward(Run& run, const Memory& at, const LayerForward<CcgqaWeights>& call) const override {
    const int64_t past = call.cache != nullptr ? call.cache->length : 0;
    Prologue p = prologue(at, call, call.weights, past);
    p.work = scratch_.work_at(at, Pass::kForward);
    p.begins = past == 0;
    if (!p.begins || !engine->makes_lead(p)) begin_lead(run, p.z, call.cache);
    run.scratch = at.scratch_at(scratch_.project);
    engine->linear(run, call.query, {call.weights.qkv, {}, 1, 1, Chain::kBegins},
                   rows(p.z, lead_, shape.q_len));
    run.scratch = at.scratch_at(scratch_.prologue[0]);
    engine->prologue(run, p);
    AttendTensors t = attend_tensors(p, at.at(heads_out_));
    const Projection output{call.weights.out, {}, o_.output_scale, 1, Chain::kGoesOn};
    if (at_once_) {
      const AttendedOutput both = attended_output(t, attend->lse_at(at), output, call.out);
      if (engine->takes(both)) {
        engine->attended_output(run, both);
        return;
      }
    }
    if (call.cache != nullptr) {
      const int64_t end = lead_ + shape.q_len;
      engine->copy(run, {{t.k, rows(call.cache->k, past, shape.q_len)},
                         {t.v, rows(call.cache->v, past, shape.q_len)},
                         {conv_rows(p.z, end), call.cache->conv},
                         {shift_row(p.z, end), call.cache->shift}});
      t.k = call.cache->k;
      t.v = call.cache->v;
    }
    attend->forward(run, *engine, at, call, t, past + shape.q_len);
    run.scratch = at.scratch_at(scratch_.output);
    engine->linear(run, at.at(heads_out_), output, call.out);
  }

  void backward(Run& run, const Memory& own,
                const LayerBackward<CcgqaWeights>& call) const override {
    const CcgqaWeights& dw = call.dweights;
    const Memory at = own.with(Room::kDprojection, dw.qkv).with(Room::kDconv, dw.q_conv2);
    const TensorView dheads = at.at(dheads_), dqk = at.at(dqk_), dv = at.at(dv_), dz = at.at(dz_);
    const auto make_dheads = [&] {
      run.scratch = at.scratch_at(scratch_.dheads);
      engine->linear_dx(
          run, call.dout,
          {call.weights.out, {}, o_.output_scale, scratch_.share_beside(), Chain::kBegins}, dheads,
          Write::kSet);
    };
    // Beside what attention waits for, or after it, if it would take multiprocessors from it.
    const bool beside = scratch_.share_aside < 1;
    if (!beside) make_dheads();
    Aside aside = engine->fork(run);
    aside.run.scratch = at.scratch_at(scratch_.dout_weight);
    engine->linear_dw(aside.run, call.dout, at.at(heads_out_),
                      {dw.out, {}, o_.output_scale, scratch_.share_aside});
    if (beside) make_dheads();
    Prologue p = prologue(at, call, call.weights, 0);
    if (u_again_.made()) p.u = at.at(u_again_);
    p.work = scratch_.work_at(at, Pass::kBackward);
    attend->backward(
        run, *engine, at, call, attend_tensors(p, at.at(heads_out_)),
        {as_heads(dheads, o_.num_heads), q_of(dqk), k_of(dqk), as_heads(dv, o_.num_kv_heads)});
    PrologueGradients g;
    g.dqk = dqk;
    g.dv = dv;
    g.dmixed = dmixed_at(at);
    if (o_.convs) g.du = at.at(du_);
    g.dz = dz;
    g.dtemperature = dw.temperature;
    set_convs(o_, dw, g.first, g.second);
    run.scratch = at.scratch_at(scratch_.prologue[1]);
    engine->prologue_backward(run, aside, p, g);
    // What is made aside reads memory that dquery may lend.
    engine->wait(run, aside);
    aside.run.scratch = at.scratch_at(scratch_.dproject_weight);
    engine->linear_dw(aside.run, dz, call.query, {dw.qkv, {}, 1, scratch_.share_last()});
    if (call.dquery.given()) {
      run.scratch = at.scratch_at(scratch_.dquery);
      engine->linear_dx(run, dz, {call.weights.qkv, {}, 1, 1, Chain::kGoesOn}, call.dquery,
                        Write::kSet);
    }
    engine->join(run, aside);
  }

  // What decode needs of the past: keys as RoPE left them, values after the shift, and the rows of
  // z that convolutions and shift reach back to.
  LayerCache cache_views() const override {
    LayerCache cache;
    cache.k = TensorView::contiguous(nullptr, dtype,
                                     {shape.batch, max_seq_len, o_.num_kv_heads, o_.head_dim});
    cache.v = cache.k;
    if (reach_ > 0) {
      cache.conv = TensorView::contiguous(nullptr, dtype, {shape.batch, reach_, qk_width()});
    }
    if (o_.value_shift) {
      cache.shift = TensorView::contiguous(nullptr, dtype, {shape.batch, 1, v_width() / 2});
    }
    return cache;
  }

 private:
  int64_t q_width() const { return o_.num_heads * o_.head_dim; }
  int64_t v_width() const { return o_.num_kv_heads * o_.head_dim; }
  int64_t qk_width() const { return q_width() + v_width(); }
  TensorView q_of(const TensorView& qk) const {
    return as_heads(columns(qk, 0, q_width()), o_.num_heads);
  }
  TensorView k_of(const TensorView& qk) const {
    return as_heads(columns(qk, q_width(), v_width()), o_.num_kv_heads);
  }

  // The smallest first, so that the others are there for what is large. Where the prologue goes
  // back at once, gradients of weights may be written as soon as it has begun, or as z's is there.
  void lend_results() {
    if (!shape.lends) return;
    const int64_t size = dtype_bytes(dtype);
    const bool at_once = goes_back_at_once();
    if (o_.convs && o_.conv == CcgqaConv::kHeadsThenAll) {
      memory.lend(Room::kDconv, q_width() * q_width() * o_.conv_taps[1] * size,
                  at_once ? back::kTokens : back::kFirst);
    }
    memory.lend(Room::kDprojection, (qk_width() + v_width()) * o_.embed_dim * size,
                at_once ? back::kFirst : back::kProject);
    lend(o_.embed_dim, forth::kOutput, back::kProject);
  }

  // Of the heads before their norm, what backward needs.
  void make_mixed() {
    const int64_t batch = shape.batch, q_len = shape.q_len;
    if (!engine->keeps_keys()) {
      mixed_ = memory.saved(dtype, {batch, q_len, qk_width()}, {forth::kPrologue, forth::kPrologue},
                            back::kTokens);
    } else if (training() && o_.qk_norm) {
      mixed_ = memory.saved(dtype, {batch, q_len, v_width()}, {}, back::kTokens);
      inverses_ = memory.saved(DType::kF32, {batch, q_len, o_.num_heads}, {}, back::kTokens);
    }
  }

  // Rows of no token follow those of each member of the batch, and come before those of the next.
  TensorView dmixed_at(const Memory& at) const {
    TensorView view = at.at(dmixed_);
    const int64_t rows = shape.q_len + margin();
    view.sizes[0] = shape.batch;
    view.sizes[1] = rows + margin();
    view.strides[0] = rows * view.strides[1];
    return view;
  }

  int64_t margin() const { return o_.convs ? o_.conv_taps[1] - 1 : 0; }

  void make_u() {
    const int64_t batch = shape.batch, rows = margin() + shape.q_len, width = qk_width();
    const Life life{forth::kPrologue, forth::kPrologue};
    Prologue like = prologue({}, {}, {}, 0);
    like.u = TensorView::contiguous(nullptr, dtype, {batch, rows, width});
    if (!training() || !engine->makes_u_again(like)) {
      u_ = memory.saved(dtype, {batch, rows, width}, life, back::kFirst);
      return;
    }
    u_ = memory.forward(dtype, {batch, rows, width}, life);
    u_again_ = memory.backward(dtype, {batch, rows, width}, {back::kAgain, back::kFirst});
  }
  bool goes_back_at_once() const { return engine->goes_back_at_once(prologue({}, {}, {}, 0)); }

  void make_gradients() {
    const int64_t batch = shape.batch, q_len = shape.q_len;
    const bool at_once = goes_back_at_once();
    dheads_ = memory.backward(dtype, {batch, q_len, q_width()}, {back::kOutput, back::kAttend});
    dqk_ = memory.backward(dtype, {batch, q_len, qk_width()}, {back::kAttend, back::kTokens});
    // Until the last step, also where all goes back at once: that depends on the weights of a call.
    dv_ = memory.backward(dtype, {batch, q_len, v_width()}, {back::kAttend, back::kFirst});
    dmixed_ = memory.backward(dtype, {1, batch * (q_len + margin()) + margin(), qk_width()},
                              {back::kTokens, back::kFirst});
    if (o_.convs) {
      const int64_t rows = margin() + q_len + o_.conv_taps[0] - 1;
      du_ = memory.backward(dtype, {batch, rows, qk_width()},
                            {at_once ? back::kTokens : back::kSecond, back::kFirst});
    }
    dz_ = memory.backward(dtype, {batch, q_len, qk_width() + v_width()},
                          {at_once ? back::kTokens : back::kFirst, back::kProject});
  }

  EngineNeeds needs(const LayerShape& with) const {
    EngineNeeds n;
    n.head_dim = o_.head_dim;
    n.tf32 = o_.tf32;
    n.forks = with.use == LayerUse::kTraining;
    // Of a bias, of each tap of a channel, of the temperatures.
    n.sums = qk_width() * (o_.convs ? std::max(o_.conv_taps[0], o_.conv_taps[1]) : 1);
    if (!o_.rope) return n;
    n.rope = o_.rotary;
    n.turning = turning_channels(o_.rotary, o_.head_dim);
    n.positions = with.use == LayerUse::kCached ? o_.max_seq_len : with.q_len;
    return n;
  }

  AttentionProblem problem() const {
    AttentionProblem p;
    p.batch = shape.batch;
    p.head_q = o_.num_heads;
    p.head_kv = o_.num_kv_heads;
    p.q_len = shape.q_len;
    p.kv_len = cached() ? max_seq_len : shape.q_len;
    p.dim_qk = p.dim_v = o_.head_dim;
    p.dtype = dtype;
    p.mask = mask_of(o_.causal, o_.sliding_window);
    p.scale = scale();
    p.tf32 = o_.tf32;
    p.determinism = o_.determinism;
    if (scales_queries()) {
      p.scale = std::numbers::ln2;
      p.logit_bound = logit_bound();
    }
    return p;
  }

  double scale() const {
    return o_.softmax_scale.value_or(1 / std::sqrt(static_cast<double>(o_.head_dim)));
  }
  // Of normalised heads.
  double length() const {
    return o_.sqrt_dim_norm ? std::sqrt(static_cast<double>(o_.head_dim)) : 1;
  }
  // Temperatures are read by the device alone: this is no more than a belief.
  double logit_bound() const {
    constexpr double kUsualTemperature = 4;
    return length() * length() * scale() * kUsualTemperature;
  }
  // Whether the prologue gives q the scale, in log2 units, so that products are exponents of 2. It
  // does where half precision holds the result as well as it holds q.
  bool scales_queries() const {
    constexpr double kLeastScale = 1.0 / 256, kMostScale = 1;
    return o_.qk_norm && scale() >= kLeastScale && scale() <= kMostScale;
  }

  Prologue prologue(const Memory& at, const LayerInputs& in, const CcgqaWeights& weights,
                    int64_t past) const {
    Prologue p;
    p.mix = {.heads = o_.num_heads,
             .heads_kv = o_.num_kv_heads,
             .dim = o_.head_dim,
             .couple = o_.qk_mean,
             .coupling = o_.coupling,
             .norm = o_.qk_norm,
             .length = length(),
             .query_length = scales_queries() ? length() * scale() * std::numbers::log2e : length(),
             .kind = o_.temperature,
             .temperature = weights.temperature,
             .positions = {in.position_ids, past},
             .value_shift = o_.value_shift};
    p.convolve = o_.convs;
    p.settled = true;  // a projection comes before, or attention
    set_convs(o_, weights, p.first, p.second);
    p.lead = lead_;
    p.z = at.at(z_);
    if (o_.convs) p.u = at.at(u_);
    p.makes_u_again = u_again_.made();
    p.keeps_u = training() && !p.makes_u_again;
    p.mixed = at.at(mixed_);
    p.inverses = at.at(inverses_);
    p.qk = at.at(qk_);
    p.v = at.at(v_);
    return p;
  }

  AttendTensors attend_tensors(const Prologue& p, const TensorView& out) const {
    return {q_of(p.qk), k_of(p.qk), as_heads(p.v, o_.num_kv_heads), as_heads(out, o_.num_heads)};
  }

  // Whether the engine may take attention and the projection of its output in one: where nothing
  // but the causal mask hides keys, and the caller has not named an engine for attention.
  bool attends_at_once(const PlanOptions& plan) const {
    if (cached() || shape.masked || !o_.causal || o_.sliding_window > 0) return false;
    if (!scales_queries() || !plan.backend.empty()) return false;
    const auto like = [&](std::initializer_list<int64_t> sizes) {
      return TensorView::contiguous(nullptr, dtype, sizes);
    };
    const int64_t batch = shape.batch, q_len = shape.q_len;
    const TensorView q = like({batch, q_len, o_.num_heads, o_.head_dim});
    const TensorView k = like({batch, q_len, o_.num_kv_heads, o_.head_dim});
    return engine->takes(attended_output({q, k, k, q}, {}, {like({o_.embed_dim, q_width()})},
                                         like({batch, q_len, o_.embed_dim})));
  }

  // Of attention's own output only backward has a use.
  AttendedOutput attended_output(const AttendTensors& t, const TensorView& lse,
                                 const Projection& project, const TensorView& out) const {
    return {t.q, t.k, t.v, training() ? t.out : TensorView{}, lse, project, out, logit_bound()};
  }

  // The rows of z before the first token: zeros at the beginning of a sequence.
  void begin_lead(Run& run, const TensorView& z, const LayerCache* cache) const {
    const bool goes_on = cache != nullptr && cache->length > 0;
    engine->copy(run, {{goes_on ? cache->conv : TensorView{}, conv_rows(z, lead_)},
                       {goes_on ? cache->shift : TensorView{}, shift_row(z, lead_)}});
  }

  // What the convolutions of the token at `row` read of those before it.
  TensorView conv_rows(const TensorView& z, int64_t row) const {
    return columns(rows(z, row - reach_, reach_), 0, qk_width());
  }

  // The values that the token at `row` takes from the one before it.
  TensorView shift_row(const TensorView& z, int64_t row) const {
    const int64_t half = v_width() / 2;
    return o_.value_shift ? columns(rows(z, row - 1, 1), qk_width() + half, half) : TensorView{};
  }

  CcgqaOptions o_;
  int64_t reach_ = 0;     // rows before a token that its convolutions read
  int64_t lead_ = 0;      // rows of z before the first token
  bool at_once_ = false;  // attention and the projection of its output may be one step
  Slot z_, u_, mixed_, inverses_, qk_, v_, heads_out_;   // saved; u_ only without u_again_
  Slot u_again_, dheads_, dqk_, dv_, dmixed_, du_, dz_;  // backward
  CcgqaScratch scratch_;
};

Result<LayerPlan<CcgqaWeights>> make(const CcgqaOptions& options, const LayerShape& shape,
                                     Device device, const PlanOptions& plan) {
  if (Status s = check_ccgqa_options(options, shape); !s.ok()) return s;
  return made_layer<CcgqaLayer>(options, shape, device, plan);
}

}  // namespace
}  // namespace layers

CcgqaOptions CcgqaOptions::hydra(int64_t embed_dim, int64_t num_heads, int64_t num_kv_heads,
                                 int64_t compression) {
  CcgqaOptions o;
  o.embed_dim = embed_dim;
  o.num_heads = num_heads;
  o.num_kv_heads = num_kv_heads;
  // A width that does not divide leaves head_dim 0, which make_layer refuses.
  const bool whole = compression > 0 && num_heads > 0 && embed_dim % compression == 0 &&
                     embed_dim / compression % num_heads == 0;
  o.head_dim = whole ? embed_dim / compression / num_heads : 0;
  o.rotary.style = RopeStyle::kInterleaved;
  return o;
}

CcgqaOptions CcgqaOptions::zaya(int64_t embed_dim, int64_t num_heads, int64_t num_kv_heads,
                                int64_t head_dim) {
  CcgqaOptions o;
  o.embed_dim = embed_dim;
  o.num_heads = num_heads;
  o.num_kv_heads = num_kv_heads;
  o.head_dim = head_dim;
  o.conv = CcgqaConv::kChannelsThenHeads;
  o.conv_taps[0] = o.conv_taps[1] = 2;
  o.conv_bias = true;
  o.coupling = CcgqaCoupling::kGroup;
  o.sqrt_dim_norm = true;
  o.temperature = KeyTemperature::kPerHeadExp;
  o.rotary.fraction = 0.5;
  return o;
}

Result<LayerPlan<CcgqaWeights>> make_layer(const CcgqaOptions& options, const LayerShape& shape,
                                           Device device, const PlanOptions& plan) {
  return guarded<Result<LayerPlan<CcgqaWeights>>>(
      [&] { return layers::make(options, shape, device, plan); });
}

}  // namespace fovea
