// Defaults and checks of LatentAttention.
#include "layers/latent_options.h"

#include <algorithm>

#include "base/refusal.h"

namespace fovea::layers {
namespace {

int64_t latent_or_default(int64_t given, int64_t embed_dim) {
  return given > 0 ? given : std::max<int64_t>(16, embed_dim / 8);
}

// RoPE or a norm on whole heads stands between a key and its latent.
bool can_absorb(const LatentOptions& o) {
  return o.form == LatentForm::kDeepSeek ||
         (o.position != Position::kRope && o.qk_norm == QkNorm::kNone);
}

}  // namespace

LatentSizes latent_sizes(const LatentOptions& o, const LayerShape& shape, OptionCheck& check) {
  check.common(o, shape);
  check.attends_to_itself(shape);
  check.is(o.form == LatentForm::kSimple || o.form == LatentForm::kDeepSeek, "form",
           show(static_cast<int64_t>(o.form)), "be kSimple (0) or kDeepSeek (1)");
  check.is(o.decode == LatentDecode::kAuto || o.decode == LatentDecode::kExpanded ||
               o.decode == LatentDecode::kAbsorbed,
           "decode", show(static_cast<int64_t>(o.decode)),
           "be kAuto (0), kExpanded (1) or kAbsorbed (2)");
  check.is(o.decode != LatentDecode::kAbsorbed || can_absorb(o), "decode", "kAbsorbed",
           "be kAuto or kExpanded where rope or qk_norm works on whole heads");
  check.channels("q_latent", o.q_latent, 0);
  check.channels("kv_latent", o.kv_latent, 0);
  LatentSizes s;
  s.embed = o.embed_dim;
  s.heads = o.num_heads;
  s.q_latent = latent_or_default(o.q_latent, o.embed_dim);
  s.kv_latent = latent_or_default(o.kv_latent, o.embed_dim);
  s.deepseek = o.form == LatentForm::kDeepSeek;
  s.qk_norm = o.qk_norm;
  if (s.deepseek) {
    check.is(o.position == Position::kRope, "position", show(static_cast<int64_t>(o.position)),
             "be kRope (1) with form = kDeepSeek");
    check.is(o.qk_norm == QkNorm::kNone, "qk_norm", show(static_cast<int64_t>(o.qk_norm)),
             "be kNone (0) with form = kDeepSeek, whose latents are normalised");
    check.is(o.head_dim == 0, "head_dim", show(o.head_dim),
             "be 0 with form = kDeepSeek: nope_dim, rope_dim and v_dim say it");
    check.channels("nope_dim", o.nope_dim, 1);
    check.channels("rope_dim", o.rope_dim, 1);
    check.channels("v_dim", o.v_dim, 1);
    s.nope = o.nope_dim;
    s.rope = o.rope_dim;
    s.v = o.v_dim;
    check.rope(o.rope, s.rope);
  } else {
    s.nope = s.v = head_dim_of(o, check);
    if (o.position == Position::kRope) check.rope(o.rope, s.nope);
  }
  if (!check.ok()) return s;
  const int64_t widest = std::max({o.embed_dim, s.q_latent, s.kv_latent});
  check.extent("weights", {2, o.num_heads, std::max(s.qk(), s.v), widest});
  check.extent("activations", {std::max<int64_t>(1, shape.batch),
                               std::max({int64_t{1}, shape.q_len, o.max_seq_len}), 3, o.num_heads,
                               std::max({s.qk(), s.v, widest})});
  return s;
}

bool is_absorbed(const LatentOptions& o, const LatentSizes& s, const LayerShape& shape) {
  if (shape.use != LayerUse::kCached || !can_absorb(o)) return false;
  if (o.decode != LatentDecode::kAuto) return o.decode == LatentDecode::kAbsorbed;
  // Per cached token and head: wider scores and sums for each query against one expansion.
  const int64_t wider = 2 * s.kv_latent + s.rope - s.qk() - s.v;
  return shape.q_len * wider <= s.kv_latent * (s.nope + s.v);
}

void check_latent_weights(CallCheck& check, CallCheck::Weights kind, const LatentSizes& s,
                          const LatentWeights& w) {
  const Dim embed{"embed_dim", s.embed}, q_latent{"q_latent", s.q_latent};
  const Dim kv_latent{"kv_latent", s.kv_latent}, v{"num_heads * v_dim", s.heads * s.v};
  const char* const down = s.deepseek ? "kv_latent + rope_dim" : "kv_latent";
  check.weight(kind, "q_down", w.q_down, {q_latent, embed});
  check.weight(kind, "q_up", w.q_up,
               {{"num_heads * (nope_dim + rope_dim)", s.heads * s.qk()}, q_latent});
  check.weight(kind, "kv_down", w.kv_down, {{down, s.kv_latent + s.rope}, embed});
  check.weight(kind, "k_up", w.k_up, {{"num_heads * nope_dim", s.heads * s.nope}, kv_latent});
  check.weight(kind, "v_up", w.v_up, {v, kv_latent});
  check.weight(kind, "out", w.out, {embed, v});
  struct One {
    const char* name;
    const TensorView& view;
    Dim dim;
  };
  for (const One& one : {One{"q_latent_norm", w.q_latent_norm, q_latent},
                         One{"kv_latent_norm", w.kv_latent_norm, kv_latent}}) {
    if (!s.deepseek) {
      check.absent(one.name, one.view, "form is kSimple");
    } else if (one.view.given()) {
      check.weight(kind, one.name, one.view, {one.dim});
    }
  }
  check.qk_norm(kind, s.qk_norm, s.nope, w.norm);
}

}  // namespace fovea::layers
