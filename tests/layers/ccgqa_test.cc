// CCGQA in float64: golden numbers of both presets, gradients under every toggle, exact decode.
#include "layers/layer_trial.h"

namespace fovea::test::ccgqa {
namespace {

constexpr int64_t kBatch = 2, kLen = 7, kEmbed = 32;
constexpr double kGolden = 1e-11;

CcgqaWeights hydra_weights(TensorStore& store, const CcgqaOptions& o) {
  const int64_t q = o.num_heads * o.head_dim, kv = o.num_kv_heads * o.head_dim, d = o.head_dim;
  CcgqaWeights w;
  w.qkv = store.wave({q + 2 * kv, o.embed_dim}, .71, .23, .15);
  w.out = store.wave({o.embed_dim, q}, .53, .41, .20);
  if (o.convs) {
    w.q_conv1 = store.wave({q, d, o.conv_taps[0]}, .83, .31, .30);
    w.q_conv2 = store.wave({q, q, o.conv_taps[1]}, .67, .19, .20);
    w.k_conv1 = store.wave({kv, d, o.conv_taps[0]}, .79, .29, .30);
    w.k_conv2 = store.wave({kv, kv, o.conv_taps[1]}, .61, .17, .20);
  }
  if (o.qk_norm) {
    w.temperature = store.blank({1});
    set_element(w.temperature, 0, std::sqrt(static_cast<double>(d)));
  }
  return w;
}

// The published weights apart (Wqk, Wv1, Wv2) are the rows of one here.
CcgqaWeights zaya_weights(TensorStore& store, const CcgqaOptions& o) {
  const int64_t q = o.num_heads * o.head_dim, kv = o.num_kv_heads * o.head_dim, qk = q + kv;
  CcgqaWeights w;
  w.qkv = store.blank({qk + kv, o.embed_dim});
  const TensorView parts[] = {store.wave({qk, o.embed_dim}, .71, .23, .15),
                              store.wave({kv / 2, o.embed_dim}, .47, .13, .15),
                              store.wave({kv - kv / 2, o.embed_dim}, .43, .37, .15)};
  int64_t at = 0;
  for (const TensorView& part : parts) {
    for (int64_t i = 0; i < part.elements(); ++i) set_element(w.qkv, at++, element(part, i));
  }
  w.out = store.wave({o.embed_dim, q}, .53, .41, .20);
  if (o.convs) {
    w.channel_conv = store.wave({qk, 1, o.conv_taps[0]}, .83, .31, .5);
    w.head_conv = store.wave({qk, o.head_dim, o.conv_taps[1]}, .67, .19, .3);
  }
  if (o.convs && o.conv_bias) {
    w.channel_conv_bias = store.wave({qk}, .91, .4, .3);
    w.head_conv_bias = store.wave({qk}, .59, .6, .3);
  }
  if (o.qk_norm) w.temperature = store.wave({o.num_kv_heads}, 1.0, .5, .2);
  return w;
}

CcgqaWeights weights_of(TensorStore& store, const CcgqaOptions& o) {
  return o.conv == CcgqaConv::kHeadsThenAll ? hydra_weights(store, o) : zaya_weights(store, o);
}

CcgqaOptions hydra(int64_t heads_kv = 2) {
  CcgqaOptions o = CcgqaOptions::hydra(kEmbed, 4, heads_kv, 2);
  o.dtype = DType::kF64;
  o.max_seq_len = 8;
  return o;
}

CcgqaOptions zaya() {
  CcgqaOptions o = CcgqaOptions::zaya(kEmbed, 4, 2, 4);
  o.dtype = DType::kF64;
  o.max_seq_len = 8;
  return o;
}

// The golden case of these options, forward and backward.
struct Golden {
  TensorStore store;
  std::optional<Trial<CcgqaWeights>> trial;

  explicit Golden(const CcgqaOptions& o) {
    LayerShape shape{.batch = kBatch, .q_len = kLen, .use = LayerUse::kTraining};
    auto plan = make_layer(o, shape, Device::cpu());
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    LayerInputs in;
    in.query = store.wave({kBatch, kLen, kEmbed}, .37, .11, 1);
    trial.emplace(*plan, store, in, weights_of(store, o));
    shape.lends = shape.spends = true;
    trial->expect_same_if_lent(make_layer(o, shape, Device::cpu()));
  }
  const TensorView& y() const { return trial->call.out; }
  const TensorView& dx() const { return trial->back.dquery; }
  const CcgqaWeights& dw() const { return trial->back.dweights; }
};

double last(const TensorView& t) { return element(t, t.elements() - 1); }

struct Numbers {
  double sum, absolutes, first, last;
};
void expect_numbers(const char* name, const TensorView& t, const Numbers& want) {
  EXPECT_NEAR(sum(t), want.sum, kGolden) << name;
  EXPECT_NEAR(sum_abs(t), want.absolutes, kGolden * (1 + want.absolutes)) << name;
  EXPECT_NEAR(element(t, 0), want.first, kGolden) << name;
  EXPECT_NEAR(last(t), want.last, kGolden) << name;
}

TEST(Ccgqa, GoldenHydra) {
  const Golden a(hydra());
  expect_numbers("y", a.y(),
                 {4.554672041865e-02, 5.483998305483e+00, 1.0284656569e-02, 1.2923727127e-03});
  expect_numbers("dx", a.dx(),
                 {6.659612128531e-03, 5.368934286294e-01, -2.4653362766e-03, -9.2257864532e-05});
  expect_numbers("dqkv", a.dw().qkv,
                 {4.439045909200e-01, 2.265743327336e+01, 6.3264405724e-03, -1.0008217443e-02});
  expect_numbers("dout", a.dw().out,
                 {-2.752179885786e-01, 5.235674919134e+01, -5.9001039051e-02, -1.5549774133e-02});
  expect_numbers("dq_conv1", a.dw().q_conv1,
                 {-1.553925933347e-03, 6.776052930377e-02, 8.9497969748e-04, -8.2853604110e-05});
  expect_numbers("dq_conv2", a.dw().q_conv2,
                 {3.065138140525e-03, 2.107715962669e-01, 6.0328916456e-04, 6.6699604145e-05});
  expect_numbers("dk_conv1", a.dw().k_conv1,
                 {7.609892800524e-03, 3.703025488479e-01, -3.6054749536e-03, 9.5818502339e-03});
  expect_numbers("dk_conv2", a.dw().k_conv2,
                 {2.039620428256e-04, 1.478389745135e+00, -2.4480082702e-03, -6.4178778750e-04});
  EXPECT_NEAR(element(a.dw().temperature, 0), -6.493812209406e-04, kGolden);
}

TEST(Ccgqa, GoldenHydraWithOneToggleOff) {
  struct Off {
    const char* name;
    void (*set)(CcgqaOptions&);
    double sum_abs_y, last_y, sum_abs_dx;
    std::optional<double> dtau;
  };
  for (const Off& off :
       {Off{"qk_mean", [](CcgqaOptions& o) { o.qk_mean = false; }, 5.729373499658, 1.7178505176e-03,
            0.4609341158945, -3.457507556394e-04},
        Off{"qk_norm", [](CcgqaOptions& o) { o.qk_norm = false; }, 5.756165907000, 3.8411030105e-03,
            0.2746877099680, std::nullopt},
        Off{"value_shift", [](CcgqaOptions& o) { o.value_shift = false; }, 6.073248256335,
            5.0865107090e-03, 1.164358669243, -6.878016885013e-04}}) {
    SCOPED_TRACE(off.name);
    CcgqaOptions o = hydra();
    off.set(o);
    const Golden a(o);
    EXPECT_NEAR(sum_abs(a.y()), off.sum_abs_y, kGolden);
    EXPECT_NEAR(last(a.y()), off.last_y, kGolden);
    EXPECT_NEAR(sum_abs(a.dx()), off.sum_abs_dx, kGolden);
    if (off.dtau) {
      EXPECT_NEAR(element(a.dw().temperature, 0), *off.dtau, kGolden);
    }
  }
}

TEST(Ccgqa, GoldenHydraWithAsManyKvHeads) {
  const Golden b(hydra(4));
  EXPECT_NEAR(sum_abs(b.y()), 8.339671559262, kGolden);
  EXPECT_NEAR(element(b.y(), 0), 3.3093198117e-02, kGolden);
  EXPECT_NEAR(last(b.y()), -2.5629232220e-02, kGolden);
  EXPECT_NEAR(sum_abs(b.dx()), 1.868074416170, kGolden);
  EXPECT_NEAR(element(b.dw().temperature, 0), 4.808710572897e-04, kGolden);
}

TEST(Ccgqa, GoldenZaya) {
  CcgqaOptions o = zaya();
  o.conv_bias = false;
  o.rotary.fraction = 1;
  const Golden p(o);
  expect_numbers("y", p.y(),
                 {4.163709560571e-01, 8.971245297048e+01, -3.1130914752e-02, -5.3130454291e-02});
  EXPECT_NEAR(sum_abs(p.dx()), 1.095797602207e+01, 12 * kGolden);
  TensorView dqk = p.dw().qkv;
  dqk.sizes[0] = 24;  // without the rows of v
  EXPECT_NEAR(sum_abs(dqk), 7.280081742358e+01, 73 * kGolden);
  EXPECT_NEAR(sum_abs(p.dw().channel_conv), 1.235515924698, kGolden);
  EXPECT_NEAR(sum_abs(p.dw().head_conv), 4.229563155643, 5 * kGolden);
  EXPECT_NEAR(element(p.dw().temperature, 0), 5.7462967724e-02, kGolden);
  EXPECT_NEAR(element(p.dw().temperature, 1), 5.9926890990e-02, kGolden);
}

struct Variant {
  std::string name;
  CcgqaOptions options;
};

std::vector<Variant> variants() {
  std::vector<Variant> all;
  for (const bool is_hydra : {true, false}) {
    const CcgqaOptions base = is_hydra ? hydra() : zaya();
    const std::string preset = is_hydra ? "hydra" : "zaya";
    const auto add = [&](const std::string& name, const std::function<void(CcgqaOptions&)>& set) {
      all.push_back({preset + " " + name, base});
      set(all.back().options);
    };
    add("as it is", [](CcgqaOptions&) {});
    add("no convs", [](CcgqaOptions& o) { o.convs = false; });
    add("no qk_mean", [](CcgqaOptions& o) { o.qk_mean = false; });
    add("no qk_norm", [](CcgqaOptions& o) { o.qk_norm = false; });
    add("no rope", [](CcgqaOptions& o) { o.rope = false; });
    add("no value_shift", [](CcgqaOptions& o) { o.value_shift = false; });
    add("nothing",
        [](CcgqaOptions& o) { o.convs = o.qk_mean = o.qk_norm = o.rope = o.value_shift = false; });
    add("one KV head", [](CcgqaOptions& o) { o.num_kv_heads = 1; });
    add("odd KV heads", [](CcgqaOptions& o) { o.num_heads = 6, o.num_kv_heads = 3; });
    add("as many KV heads", [](CcgqaOptions& o) { o.num_kv_heads = o.num_heads; });
    add("other taps", [](CcgqaOptions& o) { o.conv_taps[0] = 2, o.conv_taps[1] = 4; });
    add("one tap", [](CcgqaOptions& o) { o.conv_taps[0] = o.conv_taps[1] = 1; });
    add("window", [](CcgqaOptions& o) { o.sliding_window = 3; });
    add("scaled", [](CcgqaOptions& o) { o.output_scale = 1.7, o.softmax_scale = .4; });
    add("other coupling", [](CcgqaOptions& o) {
      o.coupling =
          o.coupling == CcgqaCoupling::kGroup ? CcgqaCoupling::kAllHeads : CcgqaCoupling::kGroup;
    });
    if (!is_hydra) {
      add("plain temperature", [](CcgqaOptions& o) { o.temperature = KeyTemperature::kPerHead; });
      add("no conv bias", [](CcgqaOptions& o) { o.conv_bias = false; });
    }
  }
  return all;
}

TEST(Ccgqa, GradientsMatchFiniteDifferences) {
  std::vector<Variant> all = variants();
  for (const bool is_hydra : {true, false}) {
    all.push_back({"not causal", is_hydra ? hydra() : zaya()});
    all.back().options.causal = false;
  }
  for (const Variant& variant : all) {
    SCOPED_TRACE(variant.name);
    Golden(variant.options).trial->expect_gradients_match_finite_differences();
  }
}

TEST(Ccgqa, DecodeAgreesBitForBit) {
  for (const Variant& variant : variants()) {
    SCOPED_TRACE(variant.name);
    TensorStore store;
    LayerForward<CcgqaWeights> whole;
    whole.query = store.wave({kBatch, kLen, kEmbed}, .37, .11, 1);
    whole.weights = weights_of(store, variant.options);
    whole.out = store.like(whole.query);
    auto plan = make_layer(variant.options, {.batch = kBatch, .q_len = kLen}, Device::cpu());
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    const Status done = plan->forward(whole, Scratch(plan->workspace_bytes(Pass::kForward)));
    ASSERT_TRUE(done.ok()) << done.message();
    const auto make = [&](int64_t count) {
      return make_layer(variant.options,
                        {.batch = kBatch, .q_len = count, .use = LayerUse::kCached}, Device::cpu());
    };
    for (const std::vector<int64_t>& chunks :
         {std::vector<int64_t>{7}, {1, 1, 1, 1, 1, 1, 1}, {3, 4}, {2, 1, 4}}) {
      expect_same_bits(decode(make, whole, chunks, store), whole.out,
                       std::to_string(chunks.size()) + " chunks");
    }
  }
}

// A row of padding is a row of zeros whose keys are masked: what follows it does not notice.
TEST(Ccgqa, LeftPaddingChangesNothing) {
  for (const CcgqaOptions& options : {hydra(), zaya()}) {
    TensorStore store;
    constexpr int64_t kPad = 4;
    LayerForward<CcgqaWeights> plain, padded;
    plain.query = store.wave({1, kLen, kEmbed}, .37, .11, 1);
    plain.weights = padded.weights = weights_of(store, options);
    padded.query = store.wave({1, kPad + kLen, kEmbed}, 0, 0, 0);
    for (int64_t i = 0; i < plain.query.elements(); ++i) {
      set_element(padded.query, kPad * kEmbed + i, element(plain.query, i));
    }
    padded.mask = store.bytes(DType::kBool, {1, kPad + kLen});
    for (int64_t i = 0; i < kPad + kLen; ++i) static_cast<bool*>(padded.mask.data)[i] = i >= kPad;
    plain.out = store.like(plain.query);
    padded.out = store.like(padded.query);
    auto a = make_layer(options, {.batch = 1, .q_len = kLen}, Device::cpu());
    auto b = make_layer(options, {.batch = 1, .q_len = kPad + kLen, .masked = true}, Device::cpu());
    ASSERT_TRUE(a.ok() && b.ok());
    ASSERT_TRUE(a->forward(plain, Scratch(a->workspace_bytes(Pass::kForward))).ok());
    const Status done = b->forward(padded, Scratch(b->workspace_bytes(Pass::kForward)));
    ASSERT_TRUE(done.ok()) << done.message();
    for (int64_t i = 0; i < plain.out.elements(); ++i) {
      EXPECT_NEAR(element(padded.out, kPad * kEmbed + i), element(plain.out, i), 1e-13);
    }
    for (int64_t i = 0; i < kPad * kEmbed; ++i) EXPECT_EQ(element(padded.out, i), 0);
  }
}

}  // namespace
}  // namespace fovea::test::ccgqa
