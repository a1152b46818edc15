// The classic layers in float64: gradients, decode, and what each option means.
#include "layers/layer_trial.h"

namespace fovea::test::classic {
namespace {

constexpr int64_t kBatch = 2, kLen = 7, kEmbed = 12, kHeads = 4, kDim = 6;

template <typename Options>
Options small_options() {
  Options o;
  o.embed_dim = kEmbed;
  o.num_heads = kHeads;
  o.head_dim = kDim;
  o.dtype = DType::kF64;
  o.max_seq_len = 9;
  return o;
}

void add_norm(TensorStore& store, QkNorm kind, QkNormWeights& norm) {
  if (kind == QkNorm::kNone) return;
  norm.q = store.wave({kDim}, .3, 1.2, 1);
  norm.k = store.wave({kDim}, .4, 1.1, 1);
  if (kind != QkNorm::kLayer) return;
  norm.q_bias = store.wave({kDim}, .5, .2, .3);
  norm.k_bias = store.wave({kDim}, .6, .1, .3);
}

FusedWeights fused_weights(TensorStore& store, int64_t heads_kv, bool bias, QkNorm norm) {
  const int64_t width = (kHeads + 2 * heads_kv) * kDim;
  FusedWeights w;
  w.qkv = store.wave({width, kEmbed}, .71, .23, .4);
  w.out = store.wave({kEmbed, kHeads * kDim}, .53, .41, .3);
  if (bias) {
    w.qkv_bias = store.wave({width}, .37, .3, .2);
    w.out_bias = store.wave({kEmbed}, .31, .7, .2);
  }
  add_norm(store, norm, w.norm);
  return w;
}

struct Variant {
  std::string name;
  std::function<void(GroupedQueryOptions&)> set;
};

const std::vector<Variant>& variants() {
  using O = GroupedQueryOptions;
  static const std::vector<Variant> all = {
      {"plain", [](O&) {}},
      {"causal", [](O& o) { o.causal = true; }},
      {"rope half", [](O& o) { o.causal = true, o.position = Position::kRope; }},
      {"rope interleaved on two thirds",
       [](O& o) {
         o.causal = true, o.position = Position::kRope, o.rope.style = RopeStyle::kInterleaved;
         o.rope.fraction = 2.0 / 3, o.rope.base = 500;
       }},
      {"alibi", [](O& o) { o.causal = true, o.position = Position::kAlibi; }},
      {"rms norm", [](O& o) { o.qk_norm = QkNorm::kRms, o.position = Position::kRope; }},
      {"layer norm", [](O& o) { o.causal = true, o.qk_norm = QkNorm::kLayer; }},
      {"window", [](O& o) { o.causal = true, o.sliding_window = 3; }},
      {"window both ways", [](O& o) { o.sliding_window = 2; }},
      {"dropout", [](O& o) { o.dropout = .3; }},
      {"no bias, own scale", [](O& o) { o.bias = false, o.softmax_scale = .7; }},
  };
  return all;
}

TEST(ClassicLayers, GroupedQueryGradientsMatchFiniteDifferences) {
  for (const Variant& variant : variants()) {
    for (const int64_t heads_kv : {1, 2, 4}) {
      SCOPED_TRACE(variant.name + ", KV heads " + std::to_string(heads_kv));
      auto options = small_options<GroupedQueryOptions>();
      options.num_kv_heads = heads_kv;
      variant.set(options);
      LayerShape shape{.batch = kBatch, .q_len = kLen, .use = LayerUse::kTraining};
      auto plan = make_layer(options, shape, Device::cpu());
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      TensorStore store;
      LayerInputs in;
      in.query = store.wave({kBatch, kLen, kEmbed}, .37, .11, 1);
      in.dropout = {5, 9};
      Trial<FusedWeights> trial(*plan, store, in,
                                fused_weights(store, heads_kv, options.bias, options.qk_norm));
      trial.expect_gradients_match_finite_differences();
      shape.lends = shape.spends = true;
      trial.expect_same_if_lent(make_layer(options, shape, Device::cpu()));
    }
  }
}

TEST(ClassicLayers, DecodeAgreesBitForBit) {
  for (const Variant& variant : variants()) {
    SCOPED_TRACE(variant.name);
    auto options = small_options<GroupedQueryOptions>();
    options.num_kv_heads = 2;
    variant.set(options);
    options.causal = true;
    options.dropout = 0;  // drawn by a query's place in its call
    TensorStore store;
    LayerForward<FusedWeights> whole;
    whole.query = store.wave({kBatch, kLen, kEmbed}, .37, .11, 1);
    whole.weights = fused_weights(store, 2, options.bias, options.qk_norm);
    whole.out = store.like(whole.query);
    auto plan = make_layer(options, {.batch = kBatch, .q_len = kLen}, Device::cpu());
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    const Status done = plan->forward(whole, Scratch(plan->workspace_bytes(Pass::kForward)));
    ASSERT_TRUE(done.ok()) << done.message();
    const auto make = [&](int64_t count) {
      return make_layer(options, {.batch = kBatch, .q_len = count, .use = LayerUse::kCached},
                        Device::cpu());
    };
    for (const std::vector<int64_t>& chunks :
         {std::vector<int64_t>{7}, {1, 1, 1, 1, 1, 1, 1}, {3, 4}, {2, 1, 4}}) {
      expect_same_bits(decode(make, whole, chunks, store), whole.out,
                       std::to_string(chunks.size()) + " chunks");
    }
  }
}

MultiHeadWeights multi_head_weights(TensorStore& store, int64_t kdim, int64_t vdim) {
  constexpr int64_t kWidth = kHeads * kDim;
  MultiHeadWeights w;
  w.q = store.wave({kWidth, kEmbed}, .71, .23, .4);
  w.k = store.wave({kWidth, kdim}, .61, .33, .4);
  w.v = store.wave({kWidth, vdim}, .81, .13, .4);
  w.out = store.wave({kEmbed, kWidth}, .53, .41, .3);
  w.q_bias = store.wave({kWidth}, .37, .3, .2);
  w.k_bias = store.wave({kWidth}, .27, .3, .2);
  w.v_bias = store.wave({kWidth}, .47, .3, .2);
  w.out_bias = store.wave({kEmbed}, .31, .7, .2);
  return w;
}

TEST(ClassicLayers, CrossAttentionGradientsMatchFiniteDifferences) {
  auto options = small_options<MultiHeadOptions>();
  options.kdim = 5, options.vdim = 9;
  options.position = Position::kRope;
  options.causal = true;
  constexpr int64_t kKeys = 9;
  LayerShape shape{.batch = kBatch, .q_len = kLen, .kv_len = kKeys, .use = LayerUse::kTraining};
  auto plan = make_layer(options, shape, Device::cpu());
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  TensorStore store;
  LayerInputs in;
  in.query = store.wave({kBatch, kLen, kEmbed}, .37, .11, 1);
  in.key = store.wave({kBatch, kKeys, 5}, .47, .21, 1);
  in.value = store.wave({kBatch, kKeys, 9}, .57, .31, 1);
  Trial<MultiHeadWeights> trial(*plan, store, in, multi_head_weights(store, 5, 9));
  trial.expect_gradients_match_finite_differences();
  shape.lends = shape.spends = true;
  trial.expect_same_if_lent(make_layer(options, shape, Device::cpu()));
}

TEST(ClassicLayers, MultiHeadGradientsReachWhateverStoodInForKeyAndValue) {
  const auto options = small_options<MultiHeadOptions>();
  for (const bool key_given : {false, true}) {
    LayerShape shape{.batch = kBatch, .q_len = kLen, .use = LayerUse::kTraining};
    auto plan = make_layer(options, shape, Device::cpu());
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    TensorStore store;
    LayerInputs in;
    in.query = store.wave({kBatch, kLen, kEmbed}, .37, .11, 1);
    if (key_given) in.key = store.wave({kBatch, kLen, kEmbed}, .47, .21, 1);
    Trial<MultiHeadWeights> trial(*plan, store, in, multi_head_weights(store, kEmbed, kEmbed));
    trial.expect_gradients_match_finite_differences();
    shape.lends = shape.spends = true;
    trial.expect_same_if_lent(make_layer(options, shape, Device::cpu()));
  }
}

// The fused layer is MultiHeadAttention with its weights stacked.
TEST(ClassicLayers, SelfAttentionIsMultiHeadAttentionOfOneInput) {
  TensorStore store;
  const MultiHeadWeights apart = multi_head_weights(store, kEmbed, kEmbed);
  FusedWeights fused;
  constexpr int64_t kWidth = kHeads * kDim;
  fused.qkv = store.blank({3 * kWidth, kEmbed});
  fused.qkv_bias = store.blank({3 * kWidth});
  fused.out = apart.out;
  fused.out_bias = apart.out_bias;
  const TensorView* weights[] = {&apart.q, &apart.k, &apart.v};
  const TensorView* biases[] = {&apart.q_bias, &apart.k_bias, &apart.v_bias};
  for (int64_t part = 0; part < 3; ++part) {
    for (int64_t i = 0; i < kWidth * kEmbed; ++i) {
      set_element(fused.qkv, part * kWidth * kEmbed + i, element(*weights[part], i));
    }
    for (int64_t i = 0; i < kWidth; ++i) {
      set_element(fused.qkv_bias, part * kWidth + i, element(*biases[part], i));
    }
  }
  const LayerShape shape{.batch = kBatch, .q_len = kLen};
  auto multi = make_layer(small_options<MultiHeadOptions>(), shape, Device::cpu());
  auto self = make_layer(small_options<SelfAttentionOptions>(), shape, Device::cpu());
  ASSERT_TRUE(multi.ok() && self.ok());
  LayerForward<MultiHeadWeights> a;
  LayerForward<FusedWeights> b;
  a.query = b.query = store.wave({kBatch, kLen, kEmbed}, .37, .11, 1);
  a.weights = apart;
  b.weights = fused;
  a.out = store.like(a.query);
  b.out = store.like(b.query);
  ASSERT_TRUE(multi->forward(a, Scratch(multi->workspace_bytes(Pass::kForward))).ok());
  ASSERT_TRUE(self->forward(b, Scratch(self->workspace_bytes(Pass::kForward))).ok());
  expect_same_bits(a.out, b.out, "out");
}

TEST(ClassicLayers, EmptyBatchesAndSequencesAreLegal) {
  auto options = small_options<GroupedQueryOptions>();
  options.num_kv_heads = 2;
  for (const auto& [batch, len, lends] : {std::tuple<int64_t, int64_t, bool>{0, 4, false},
                                          {2, 0, false},
                                          {0, 4, true},
                                          {2, 0, true}}) {
    const LayerShape shape{
        .batch = batch, .q_len = len, .use = LayerUse::kTraining, .lends = lends};
    auto plan = make_layer(options, shape, Device::cpu());
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    TensorStore store;
    LayerInputs in;
    in.query = store.wave({batch, len, kEmbed}, .37, .11, 1);
    Trial<FusedWeights> trial(*plan, store, in, fused_weights(store, 2, true, QkNorm::kNone));
    trial.run();
    EXPECT_EQ(sum_abs(trial.back.dweights.qkv), 0);
    EXPECT_EQ(sum_abs(trial.back.dweights.out_bias), 0);
  }
}

// Of an input wider than the products' shared scratch has columns.
TEST(ClassicLayers, NoTokensOfAWideInput) {
  constexpr int64_t kWide = 65600;
  MultiHeadOptions options;
  options.embed_dim = kWide;
  options.num_heads = 1;
  options.head_dim = 2;
  options.bias = false;
  auto plan =
      make_layer(options, {.batch = 1, .q_len = 0, .use = LayerUse::kTraining}, Device::cpu());
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  TensorStore store(DType::kF32);
  LayerInputs in;
  in.query = store.blank({1, 0, kWide});
  const TensorView inner = store.blank({2, kWide});
  MultiHeadWeights weights;
  weights.q = weights.k = weights.v = inner;
  weights.out = store.blank({kWide, 2});
  Trial<MultiHeadWeights> trial(*plan, store, in, weights);
  trial.run();
  EXPECT_EQ(sum_abs(trial.back.dweights.q), 0);
  EXPECT_EQ(sum_abs(trial.back.dweights.out), 0);
}

// A query that meets no key gives what attention to nothing does: zeros, and the bias of the
// output.
TEST(ClassicLayers, NoKeysAreLegal) {
  auto options = small_options<MultiHeadOptions>();
  auto plan = make_layer(options, {.batch = 2, .q_len = 3, .kv_len = 0, .use = LayerUse::kTraining},
                         Device::cpu());
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  TensorStore store;
  LayerInputs in;
  in.query = store.wave({2, 3, kEmbed}, .37, .11, 1);
  in.key = store.blank({2, 0, kEmbed});
  MultiHeadWeights weights;
  const int64_t width = options.num_heads * options.head_dim;
  for (TensorView* w : {&weights.q, &weights.k, &weights.v}) *w = store.normal({width, kEmbed}, .3);
  for (TensorView* b : {&weights.q_bias, &weights.k_bias, &weights.v_bias}) {
    *b = store.normal({width}, .3);
  }
  weights.out = store.normal({kEmbed, width}, .3);
  weights.out_bias = store.normal({kEmbed}, .3);
  Trial<MultiHeadWeights> trial(*plan, store, in, weights);
  trial.run();
  for (int64_t i = 0; i < trial.call.out.elements(); ++i) {
    EXPECT_EQ(element(trial.call.out, i), element(weights.out_bias, i % kEmbed));
  }
  EXPECT_EQ(sum_abs(trial.back.dquery), 0);
  EXPECT_EQ(sum_abs(trial.back.dweights.k), 0);
}

}  // namespace
}  // namespace fovea::test::classic
