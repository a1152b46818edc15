// Layers on a GPU: every option of the classic and the latent ones, forward and backward, under the
// 2x rule.
#include "layer_samples.h"

namespace fovea::test {
namespace {

struct Variant {
  const char* name;
  void (*set)(GroupedQueryOptions&);
};
using O = GroupedQueryOptions;
constexpr Variant kVariants[] = {
    {"plain", [](O&) {}},
    {"causal, no bias, own scale",
     [](O& o) { o.causal = true, o.bias = false, o.softmax_scale = .3; }},
    {"rope half", [](O& o) { o.causal = true, o.position = Position::kRope; }},
    {"rope interleaved on two thirds",
     [](O& o) {
       o.causal = true, o.position = Position::kRope, o.rope.style = RopeStyle::kInterleaved;
       o.rope.fraction = 2.0 / 3, o.rope.base = 500;
       o.head_dim = o.head_dim / 6 * 6;
     }},
    {"rope interleaved",
     [](O& o) { o.position = Position::kRope, o.rope.style = RopeStyle::kInterleaved; }},
    {"alibi", [](O& o) { o.causal = true, o.position = Position::kAlibi; }},
    {"rms norm", [](O& o) { o.qk_norm = QkNorm::kRms, o.position = Position::kRope; }},
    {"layer norm", [](O& o) { o.causal = true, o.qk_norm = QkNorm::kLayer; }},
    {"window", [](O& o) { o.causal = true, o.sliding_window = 9; }},
    {"dropout", [](O& o) { o.dropout = .3; }},
};

TEST_F(DeviceLayers, GroupedQuery) {
  for (const Variant& variant : kVariants) {
    for (GroupedSizes s : {kOdd, kEven, kOneKv}) {
      SCOPED_TRACE(std::string(variant.name) + ", head dim " + std::to_string(s.dim));
      GroupedQueryOptions changed;
      changed.head_dim = s.dim;
      variant.set(changed);
      s.dim = changed.head_dim;
      expect_layer_accurate(grouped(s, variant.set));
      if (HasFatalFailure()) return;
    }
  }
}

// Padding that is true where a key takes part, and positions of one's own.
TEST_F(DeviceLayers, MasksAndPositionIds) {
  for (const bool as_scores : {false, true}) {
    GroupedSample sample = grouped(kOdd, [](O& o) { o.position = Position::kRope; });
    sample.shape.masked = true;
    sample.inputs = [&](TensorStore& store, LayerInputs& in) {
      const int64_t batch = kOdd.batch, len = kOdd.len;
      in.mask = as_scores ? store.bytes(DType::kBool, {batch, 1, len, len})
                          : store.bytes(DType::kBool, {batch, len});
      for (int64_t i = 0; i < in.mask.elements(); ++i) {
        static_cast<bool*>(in.mask.data)[i] = i * 7 % 5 != 0;
      }
      in.position_ids = store.bytes(DType::kI32, {batch, len});
      for (int64_t i = 0; i < batch * len; ++i) {
        static_cast<int32_t*>(in.position_ids.data)[i] = static_cast<int32_t>(100000 + i * i % 977);
      }
    };
    expect_layer_accurate(sample);
  }
}

using MultiHeadSample = LayerSample<MultiHeadWeights, MultiHeadOptions>;

MultiHeadSample multi_head(int64_t embed, int64_t kdim, int64_t vdim, int64_t heads, int64_t dim) {
  MultiHeadSample sample;
  sample.options.embed_dim = embed;
  sample.options.num_heads = heads;
  sample.options.head_dim = dim;
  sample.options.kdim = kdim;
  sample.options.vdim = vdim;
  sample.weights = [=](TensorStore& store) {
    const int64_t width = heads * dim;
    MultiHeadWeights w;
    w.q = store.normal({width, embed}, weight_scale(embed));
    w.k = store.normal({width, kdim}, weight_scale(kdim));
    w.v = store.normal({width, vdim}, weight_scale(vdim));
    w.out = store.normal({embed, width}, weight_scale(width));
    w.q_bias = store.normal({width}, .1);
    w.k_bias = store.normal({width}, .1);
    w.v_bias = store.normal({width}, .1);
    w.out_bias = store.normal({embed}, .1);
    return w;
  };
  return sample;
}

TEST_F(DeviceLayers, CrossAttention) {
  MultiHeadSample sample = multi_head(40, 29, 51, 4, 24);
  sample.shape = {.batch = 2, .q_len = 33, .kv_len = 71, .use = LayerUse::kTraining};
  sample.options.position = Position::kRope;
  sample.options.causal = true;
  sample.inputs = [](TensorStore& store, LayerInputs& in) {
    in.key = store.normal({2, 71, 29}, 1);
    in.value = store.normal({2, 71, 51}, 1);
  };
  expect_layer_accurate(sample);
}

// Products of many tiles, and gradients that add up in one tensor.
TEST_F(DeviceLayers, MultiHeadOfOneInput) {
  MultiHeadSample sample = multi_head(520, 520, 520, 8, 64);
  sample.shape = {.batch = 2, .q_len = 150, .use = LayerUse::kTraining};
  expect_layer_accurate(sample);
}

TEST_F(DeviceLayers, Latent) {
  expect_layer_accurate(latent(kSimple, [](LatentOptions&) {}));
  expect_layer_accurate(latent(kSimple, [](LatentOptions& o) { o.position = Position::kRope; }));
  expect_layer_accurate(latent(kSimple, [](LatentOptions& o) { o.qk_norm = QkNorm::kRms; }));
  expect_layer_accurate(latent(kDeepSeek, [](LatentOptions&) {}));
  expect_layer_accurate(latent(kOddDeepSeek, [](LatentOptions& o) {
    o.rope.style = RopeStyle::kInterleaved;
    o.sliding_window = 11;
  }));
}

TEST_F(DeviceLayers, Ccgqa) {
  for (const CcgqaOptions& preset :
       {CcgqaOptions::hydra(64, 4, 2, 1), CcgqaOptions::zaya(45, 6, 3, 24)}) {
    struct Change {
      const char* name;
      void (*set)(CcgqaOptions&);
    };
    using C = CcgqaOptions;
    for (const Change& change : {
             Change{"as it is", [](C&) {}},
             Change{"no convolutions", [](C& o) { o.convs = false; }},
             Change{"neither norm nor mean", [](C& o) { o.qk_norm = o.qk_mean = false; }},
             Change{"no values of the token before", [](C& o) { o.value_shift = false; }},
             Change{"one KV head, a window",
                    [](C& o) { o.num_kv_heads = 1, o.sliding_window = 9, o.output_scale = 1.5; }},
         }) {
      CcgqaOptions options = preset;
      change.set(options);
      SCOPED_TRACE(std::string(options.conv == CcgqaConv::kHeadsThenAll ? "hydra" : "zaya") + ", " +
                   change.name);
      expect_layer_accurate(ccgqa(options, 2, 70));
    }
  }
}

// Layers of few channels: by tiles of tokens, and by blocks of threads that hold all weights.
TEST_F(DeviceLayers, CcgqaOfFewChannels) {
  CcgqaOptions taps = CcgqaOptions::hydra(64, 4, 2, 1);
  taps.conv_taps[0] = 2, taps.conv_taps[1] = 5;
  for (const auto& [options, batch, len] :
       {std::tuple{CcgqaOptions::hydra(512, 8, 2, 4), int64_t{2}, int64_t{96}},
        std::tuple{CcgqaOptions::hydra(128, 4, 2, 1), int64_t{1}, int64_t{61}},
        std::tuple{taps, int64_t{3}, int64_t{33}},
        std::tuple{CcgqaOptions::hydra(96, 6, 3, 1), int64_t{2}, int64_t{40}},
        std::tuple{CcgqaOptions::hydra(96, 4, 2, 1), int64_t{2}, int64_t{40}}}) {
    SCOPED_TRACE("width " + std::to_string(options.embed_dim));
    expect_layer_accurate(ccgqa(options, batch, len));
  }
}

TEST_F(DeviceLayers, CcgqaRefusesHeadsThatNoVectorDivides) {
  CcgqaOptions options = CcgqaOptions::zaya(48, 4, 2, 12);
  EXPECT_EQ(make_layer(options, {.batch = 1, .q_len = 4}, Device::cuda(0)).status().message(),
            "make_layer: CCGQA does not run on cuda:0\n"
            "  cuda  head_dim is 12, takes multiples of 8");
}

TEST_F(DeviceLayers, Tf32IsRounderThanF32) {
  GroupedSample sample = grouped(kEven, [](O& o) { o.causal = true, o.tf32 = Tf32::kAllowed; });
  TensorStore narrow(DType::kF32), exact;
  const LayerValues<FusedWeights> values(sample, narrow), exact_values(values, exact);
  const auto error = [&] {
    auto got = trial_of(plan_layer(sample, DType::kF32, Device::cuda(0)), values, narrow);
    LayerOnDevice<FusedWeights>(got).run();
    auto want = trial_of(plan_layer(sample, DType::kF64, Device::cpu()), exact_values, exact);
    want.run();
    return largest_difference(got.call.out, want.call.out);
  };
  const double rounded = error();
  sample.options.tf32 = Tf32::kForbidden;
  const double plain = error();
  EXPECT_GT(rounded, 4 * plain);
  EXPECT_LT(rounded, 0x1p-8);
  EXPECT_LT(plain, 0x1p-18);
}

// Gradients of sums over no rows are zeros.
TEST_F(DeviceLayers, EmptyBatchesAndSequencesAreLegal) {
  for (const auto& [batch, len] : {std::pair<int64_t, int64_t>{0, 4}, {2, 0}}) {
    GroupedSizes s = kOdd;
    s.batch = batch;
    s.len = len;
    const GroupedSample sample = grouped(s, [](O& o) { o.position = Position::kRope; });
    TensorStore store(DType::kBf16);
    const LayerValues<FusedWeights> values(sample, store);
    auto trial = trial_of(plan_layer(sample, DType::kBf16, Device::cuda(0)), values, store);
    LayerOnDevice<FusedWeights>(trial).run();
    EXPECT_EQ(sum_abs(trial.back.dweights.qkv), 0);
    EXPECT_EQ(sum_abs(trial.back.dweights.out_bias), 0);
    const CcgqaSample other = ccgqa(CcgqaOptions::zaya(48, 4, 2, 16), batch, len);
    const LayerValues<CcgqaWeights> other_values(other, store);
    auto again = trial_of(plan_layer(other, DType::kBf16, Device::cuda(0)), other_values, store);
    LayerOnDevice<CcgqaWeights>(again).run();
    visit(again.back.dweights, [](const char* name, TensorView& w) {
      if (w.given()) {
        EXPECT_EQ(sum_abs(w), 0) << name;
      }
    });
  }
}

TEST_F(DeviceLayers, RefusesF64AndTheHostsMemory) {
  const GroupedSample sample = grouped(kOdd, [](O&) {});
  GroupedQueryOptions o = sample.options;
  o.dtype = DType::kF64;
  const auto exact = make_layer(o, sample.shape, Device::cuda(0));
  EXPECT_EQ(exact.status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(exact.status().message(),
            "make_layer: layers do not run on cuda:0\n"
            "  cuda  dtype is f64, takes f32, bf16 and f16");
  TensorStore store(DType::kF32);
  const LayerValues<FusedWeights> values(sample, store);
  auto trial = trial_of(plan_layer(sample, DType::kF32, Device::cuda(0)), values, store);
  const PoisonedMemory workspace(trial.plan.workspace_bytes(Pass::kForward));
  const PoisonedMemory saved(trial.plan.saved_bytes());
  EXPECT_EQ(trial.plan.forward(trial.call, workspace, saved).message(),
            "forward: query.device is cpu, must be cuda:0");
}

}  // namespace
}  // namespace fovea::test
