// LatentAttention in float64: gradients of both forms, decode from cached latents.
#include "layers/layer_trial.h"

namespace fovea::test::latent {
namespace {

constexpr int64_t kBatch = 2, kLen = 6, kEmbed = 20, kHeads = 3;

LatentOptions simple() {
  LatentOptions o;
  o.embed_dim = kEmbed;
  o.num_heads = kHeads;
  o.head_dim = 4;
  o.dtype = DType::kF64;
  o.causal = true;
  o.max_seq_len = 8;
  return o;
}

LatentOptions deepseek() {
  LatentOptions o = simple();
  o.form = LatentForm::kDeepSeek;
  o.head_dim = 0;
  o.q_latent = 9;
  o.kv_latent = 7;
  o.nope_dim = 4;
  o.rope_dim = 6;
  o.v_dim = 5;
  o.position = Position::kRope;
  o.rope.style = RopeStyle::kInterleaved;
  return o;
}

LatentWeights weights_of(TensorStore& store, const LatentOptions& o) {
  const bool deep = o.form == LatentForm::kDeepSeek;
  const int64_t ql = o.q_latent > 0 ? o.q_latent : 16, kl = o.kv_latent > 0 ? o.kv_latent : 16;
  const int64_t nope = deep ? o.nope_dim : o.head_dim, rope = deep ? o.rope_dim : 0;
  const int64_t v = deep ? o.v_dim : o.head_dim;
  LatentWeights w;
  w.q_down = store.wave({ql, kEmbed}, .71, .23, .4);
  w.q_up = store.wave({kHeads * (nope + rope), ql}, .61, .33, .4);
  w.kv_down = store.wave({kl + rope, kEmbed}, .81, .13, .4);
  w.k_up = store.wave({kHeads * nope, kl}, .53, .41, .4);
  w.v_up = store.wave({kHeads * v, kl}, .47, .43, .4);
  w.out = store.wave({kEmbed, kHeads * v}, .37, .3, .4);
  if (deep) {
    w.q_latent_norm = store.wave({ql}, .3, 1.2, 1);
    w.kv_latent_norm = store.wave({kl}, .4, 1.1, 1);
  }
  if (o.qk_norm != QkNorm::kNone) {
    w.norm.q = store.wave({nope}, .3, 1.2, 1);
    w.norm.k = store.wave({nope}, .4, 1.1, 1);
  }
  return w;
}

struct Variant {
  std::string name;
  LatentOptions options;
};

std::vector<Variant> variants() {
  std::vector<Variant> all = {{"simple", simple()},        {"simple, rope", simple()},
                              {"simple, alibi", simple()}, {"simple, rms norm", simple()},
                              {"deepseek", deepseek()},    {"deepseek, window", deepseek()}};
  all[1].options.position = Position::kRope;
  all[2].options.position = Position::kAlibi;
  all[3].options.qk_norm = QkNorm::kRms;
  all[5].options.sliding_window = 3;
  return all;
}

TEST(Latent, GradientsMatchFiniteDifferences) {
  for (const Variant& variant : variants()) {
    SCOPED_TRACE(variant.name);
    LayerShape shape{.batch = kBatch, .q_len = kLen, .use = LayerUse::kTraining};
    auto plan = make_layer(variant.options, shape, Device::cpu());
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    TensorStore store;
    LayerInputs in;
    in.query = store.wave({kBatch, kLen, kEmbed}, .37, .11, 1);
    Trial<LatentWeights> trial(*plan, store, in, weights_of(store, variant.options));
    trial.expect_gradients_match_finite_differences();
    shape.lends = shape.spends = true;
    trial.expect_same_if_lent(make_layer(variant.options, shape, Device::cpu()));
  }
}

// Within one way of decoding every cut gives the same bits; the two ways differ by rounding alone.
TEST(Latent, DecodeAgrees) {
  for (const Variant& variant : variants()) {
    TensorStore store;
    LayerForward<LatentWeights> whole;
    whole.query = store.wave({kBatch, kLen, kEmbed}, .37, .11, 1);
    whole.weights = weights_of(store, variant.options);
    whole.out = store.like(whole.query);
    auto plan = make_layer(variant.options, {.batch = kBatch, .q_len = kLen}, Device::cpu());
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    const Status done = plan->forward(whole, Scratch(plan->workspace_bytes(Pass::kForward)));
    ASSERT_TRUE(done.ok()) << done.message();
    const bool on_heads =
        variant.options.form == LatentForm::kSimple &&
        (variant.options.position == Position::kRope || variant.options.qk_norm != QkNorm::kNone);
    for (const LatentDecode way : {LatentDecode::kExpanded, LatentDecode::kAbsorbed}) {
      if (way == LatentDecode::kAbsorbed && on_heads) continue;
      SCOPED_TRACE(variant.name + (way == LatentDecode::kAbsorbed ? " absorbed" : " expanded"));
      LatentOptions options = variant.options;
      options.decode = way;
      const auto make = [&](int64_t count) {
        return make_layer(options, {.batch = kBatch, .q_len = count, .use = LayerUse::kCached},
                          Device::cpu());
      };
      const TensorView prefill = decode(make, whole, {kLen}, store);
      if (way == LatentDecode::kExpanded) {
        expect_same_bits(prefill, whole.out, "prefill");
      } else {
        EXPECT_LT(largest_difference(prefill, whole.out), 1e-13);
      }
      for (const std::vector<int64_t>& chunks :
           {std::vector<int64_t>{1, 1, 1, 1, 1, 1}, {2, 4}, {3, 1, 2}}) {
        expect_same_bits(decode(make, whole, chunks, store), prefill,
                         std::to_string(chunks.size()) + " chunks");
      }
    }
  }
}

TEST(Latent, DecodeOfOneTokenWorksOnTheLatents) {
  const auto attention = [](LatentOptions o, int64_t q_len) {
    o.max_seq_len = 4096;
    return make_layer(o, {.batch = 1, .q_len = q_len, .use = LayerUse::kCached}, Device::cpu())
        ->attention()
        .problem();
  };
  LatentOptions v3 = deepseek();
  v3.nope_dim = 128, v3.rope_dim = 64, v3.v_dim = 128, v3.kv_latent = 512;
  const AttentionProblem one = attention(v3, 1), many = attention(v3, 1024);
  EXPECT_EQ(one.head_kv, 1);
  EXPECT_EQ(one.dim_qk, 576);
  EXPECT_EQ(one.dim_v, 512);
  EXPECT_EQ(many.head_kv, kHeads);
  EXPECT_EQ(many.dim_qk, 192);
  EXPECT_EQ(many.dim_v, 128);
}

}  // namespace
}  // namespace fovea::test::latent
