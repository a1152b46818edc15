// The middle of the classic layers, both ways.
#include "layers/heads.h"

#include <algorithm>

namespace fovea::layers {

EngineNeeds Heads::needs(const LayerOptions& o, const LayerShape& shape, int64_t head_dim,
                         int64_t sums) {
  EngineNeeds needs;
  needs.sums = std::max(sums, 2 * head_dim);
  needs.tf32 = o.tf32;
  if (o.position != Position::kRope) return needs;
  needs.rope = o.rope;
  needs.turning = turning_channels(o.rope, head_dim);
  needs.positions =
      shape.use == LayerUse::kCached ? o.max_seq_len : std::max(shape.q_len, shape.kv_len);
  return needs;
}

Status Heads::make(LayerParts& parts, const LayerOptions& o, const HeadSizes& sizes,
                   const PlanOptions& plan) {
  sizes_ = sizes;
  qk_norm_ = o.qk_norm;
  norm_eps_ = o.norm_eps;
  rope_ = o.position == Position::kRope;
  const LayerShape& shape = parts.shape;
  AttentionProblem problem;
  problem.batch = shape.batch;
  problem.head_q = sizes.heads;
  problem.head_kv = sizes.heads_kv;
  problem.q_len = shape.q_len;
  problem.kv_len = parts.cached() ? parts.max_seq_len : shape.kv_len;
  problem.dim_qk = problem.dim_v = sizes.dim;
  problem.dtype = parts.dtype;
  problem.mask = mask_of(o.causal, o.sliding_window);
  problem.scale = o.softmax_scale;
  problem.dropout = o.dropout;
  problem.tf32 = o.tf32;
  problem.determinism = o.determinism;
  if (Status s = parts.make_attend(
          problem, o.position, plan,
          {.forward = {kAttend, kAttend}, .backward = {kAttendBack, kAttendBack}});
      !s.ok()) {
    return s;
  }
  MemoryPlan& memory = parts.memory;
  const DType dtype = parts.dtype;
  if (qk_norm_ != QkNorm::kNone) {
    q_normed_ = memory.saved(dtype, {shape.batch, shape.q_len, sizes.heads, sizes.dim},
                             {kProject, kAttend}, kAttendBack);
    k_normed_ = memory.saved(dtype, {shape.batch, shape.kv_len, sizes.heads_kv, sizes.dim},
                             {kProject, kAttend}, kAttendBack);
  }
  out_ =
      memory.saved(dtype, {shape.batch, shape.q_len, sizes.heads * sizes.dim}, {kAttend, kOutput});
  return {};
}

LayerCache Heads::cache_views(const LayerParts& parts) const {
  LayerCache cache;
  cache.k = TensorView::contiguous(
      nullptr, parts.dtype, {parts.shape.batch, parts.max_seq_len, sizes_.heads_kv, sizes_.dim});
  cache.v = cache.k;
  return cache;
}

void Heads::check_inputs(CallCheck& check, const LayerParts& parts, const LayerInputs& in) const {
  const LayerShape& shape = parts.shape;
  check.mask(in.mask, shape.masked, shape, sizes_.heads,
             parts.cached() ? parts.max_seq_len : shape.kv_len);
  check.positions("position_ids", in.position_ids, shape.batch, shape.q_len);
  check.positions("key_position_ids", in.key_position_ids, shape.batch, shape.kv_len);
}

// Aligned at the end, as the operator's: the last query stands at the last key.
Heads::Positions Heads::positions(const LayerParts& parts, const LayerInputs& in,
                                  int64_t past) const {
  const LayerShape& shape = parts.shape;
  Positions p{{in.position_ids, past + shape.kv_len - shape.q_len}, {in.key_position_ids, past}};
  if (!in.key_position_ids.given() && shape.kv_len == shape.q_len) p.k = p.q;
  return p;
}

TensorView Heads::forward(Run& run, const LayerParts& parts, const Memory& at,
                          const LayerInputs& in, const QkNormWeights& norm, const HeadTensors& t,
                          LayerCache* cache) const {
  const LayerEngine& engine = *parts.engine;
  const int64_t past = cache != nullptr ? cache->length : 0;
  HeadTensors ready = t;
  if (rope_) {
    const Positions p = positions(parts, in, past);
    engine.rotate(run, {{t.q, p.q}, {t.k, p.k}}, Direction::kForward);
  }
  if (qk_norm_ != QkNorm::kNone) {
    ready.q = at.at(q_normed_);
    ready.k = at.at(k_normed_);
    engine.normalise(run, t.q, norm_of(norm.q, norm.q_bias), ready.q);
    engine.normalise(run, t.k, norm_of(norm.k, norm.k_bias), ready.k);
  }
  if (cache != nullptr) {
    engine.copy(run, {{ready.k, rows(cache->k, past, parts.shape.kv_len)},
                      {ready.v, rows(cache->v, past, parts.shape.kv_len)}});
    ready.k = cache->k;
    ready.v = cache->v;
  }
  const TensorView out = at.at(out_);
  parts.attend->forward(run, engine, at, in,
                        {ready.q, ready.k, ready.v, as_heads(out, sizes_.heads)},
                        past + parts.shape.kv_len);
  return out;
}

void Heads::backward(Run& run, const LayerParts& parts, const Memory& at, const LayerInputs& in,
                     const QkNormWeights& norm, const QkNormWeights& dnorm, const HeadTensors& t,
                     const TensorView& dout, const HeadTensors& g) const {
  const LayerEngine& engine = *parts.engine;
  const bool normed = qk_norm_ != QkNorm::kNone;
  const AttendTensors tensors{normed ? at.at(q_normed_) : t.q, normed ? at.at(k_normed_) : t.k, t.v,
                              as_heads(at.at(out_), sizes_.heads)};
  parts.attend->backward(run, engine, at, in, tensors,
                         {as_heads(dout, sizes_.heads), g.q, g.k, g.v});
  if (normed) {
    engine.normalise_backward(run, g.q, t.q, norm_of(norm.q, norm.q_bias), g.q, dnorm.q,
                              dnorm.q_bias);
    engine.normalise_backward(run, g.k, t.k, norm_of(norm.k, norm.k_bias), g.k, dnorm.k,
                              dnorm.k_bias);
  }
  if (!rope_) return;
  const Positions p = positions(parts, in, 0);
  engine.rotate(run, {{g.q, p.q}, {g.k, p.k}}, Direction::kBackward);
}

}  // namespace fovea::layers
