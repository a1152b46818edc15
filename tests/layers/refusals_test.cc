// Requests that are wrong are refused before any work, by name, value and rule.
#include "layers/layer_trial.h"

namespace fovea::test {
namespace {

GroupedQueryOptions good_options() {
  GroupedQueryOptions o;
  o.embed_dim = 8;
  o.num_heads = 4;
  o.num_kv_heads = 2;
  o.dtype = DType::kF64;
  o.bias = false;
  return o;
}

TEST(LayerRefusals, OptionsOfClassicLayers) {
  struct Wrong {
    void (*set)(GroupedQueryOptions&);
    const char* message;
  };
  using O = GroupedQueryOptions;
  for (const Wrong& wrong : {
           Wrong{[](O& o) { o.embed_dim = 0; }, "make_layer: embed_dim is 0, must be at least 1"},
           Wrong{[](O& o) { o.num_heads = 3; },
                 "make_layer: num_heads is 3, must be a multiple of num_kv_heads = 2"},
           Wrong{[](O& o) { o.embed_dim = 10; },
                 "make_layer: embed_dim is 10, must be a multiple of num_heads = 4"},
           Wrong{[](O& o) { o.dtype = DType::kI32; },
                 "make_layer: dtype is i32, must be f32, f16, bf16 or f64"},
           Wrong{[](O& o) { o.dropout = 1; }, "make_layer: dropout is 1, must be in [0, 1)"},
           Wrong{[](O& o) { o.sliding_window = -1; },
                 "make_layer: sliding_window is -1, must be at least 1, or 0 for none"},
           Wrong{[](O& o) { o.position = static_cast<Position>(7); },
                 "make_layer: position is 7, must be kNone (0), kRope (1) or kAlibi (2)"},
           Wrong{[](O& o) { o.position = Position::kRope, o.rope.fraction = 1.5; },
                 "make_layer: rope.fraction is 1.5, must be in (0, 1]"},
           Wrong{[](O& o) { o.position = Position::kRope, o.head_dim = 3; },
                 "make_layer: rope.fraction is 1, must turn an even number of channels, 2 or more: "
                 "of 3 it turns 3"},
           Wrong{[](O& o) { o.head_dim = INT64_MAX, o.position = Position::kRope; },
                 "make_layer: head_dim is 9223372036854775807, must be in 0..2147483647"},
           Wrong{[](O& o) { o.embed_dim = int64_t{1} << 60, o.head_dim = 2; },
                 "make_layer: weights.qkv is 3 x 4 x 2 x 1152921504606846976, must take less than "
                 "2^60 bytes as f64"},
       }) {
    GroupedQueryOptions o = good_options();
    wrong.set(o);
    const auto plan = make_layer(o, {.batch = 1, .q_len = 4}, Device::cpu());
    ASSERT_FALSE(plan.ok()) << wrong.message;
    EXPECT_EQ(plan.status().message(), wrong.message);
    EXPECT_EQ(plan.status().code(), StatusCode::kInvalidArgument);
  }
}

TEST(LayerRefusals, ShapesAndCaches) {
  GroupedQueryOptions o = good_options();
  const auto message = [&](const LayerShape& shape) {
    return make_layer(o, shape, Device::cpu()).status().message();
  };
  EXPECT_EQ(message({.batch = -1, .q_len = 4}),
            "make_layer: shape.batch is -1, must be at least 0");
  EXPECT_EQ(message({.batch = 1, .q_len = 4, .kv_len = 5}),
            "make_layer: shape.kv_len is 5, must be kAsQuery (-1) or q_len = 4: this layer attends "
            "to query "
            "itself");
  EXPECT_EQ(message({.batch = 1, .q_len = 4, .use = LayerUse::kCached}),
            "make_layer: max_seq_len is 0, must be in 4..2147483647 for a cache: a call adds 4 "
            "tokens");
}

TEST(LayerRefusals, OptionsOfCcgqa) {
  const auto message = [](const CcgqaOptions& o) {
    return make_layer(o, {.batch = 1, .q_len = 4}, Device::cpu()).status().message();
  };
  EXPECT_EQ(message(CcgqaOptions::hydra(30, 4, 2, 4)),
            "make_layer: head_dim is 0, must be at least 1; hydra takes embed_dim / compression / "
            "num_heads, which must be whole");
  CcgqaOptions o = CcgqaOptions::hydra(64, 3, 3, 1);
  o.head_dim = 3;
  o.rope = false;
  EXPECT_EQ(message(o),
            "make_layer: num_kv_heads * head_dim is 9, must be even with value_shift: half of it "
            "is shifted");
  o = CcgqaOptions::hydra(64, 4, 2, 2);
  o.conv_bias = true;
  EXPECT_EQ(message(o), "make_layer: conv_bias is true, must be false with conv = kHeadsThenAll");
  o = CcgqaOptions::hydra(64, 4, 2, 2);
  o.conv_taps[1] = 0;
  EXPECT_EQ(message(o), "make_layer: conv_taps is 0, must be in 1..64");
  o = CcgqaOptions::zaya(2, 1, 1, 2);
  o.conv_taps[0] = o.conv_taps[1] = 64;
  o.rope = false;
  EXPECT_EQ(
      make_layer(o, {.batch = int64_t{1} << 50, .q_len = 1}, Device::cpu()).status().message(),
      "make_layer: activations is 1125899906842624 x 257 x 3 x 1 x 2, must take less than 2^60 "
      "bytes as f64")
      << "rows that convolutions reach are rows too";
}

TEST(LayerRefusals, OptionsOfLatent) {
  LatentOptions o;
  o.embed_dim = 32;
  o.num_heads = 2;
  o.position = Position::kRope;
  o.decode = LatentDecode::kAbsorbed;
  const auto message = [](const LatentOptions& options) {
    return make_layer(options, {.batch = 1, .q_len = 4}, Device::cpu()).status().message();
  };
  EXPECT_EQ(message(o),
            "make_layer: decode is kAbsorbed, must be kAuto or kExpanded where rope or qk_norm "
            "works on whole heads");
  o.form = LatentForm::kDeepSeek;
  o.qk_norm = QkNorm::kRms;
  EXPECT_EQ(message(o),
            "make_layer: qk_norm is 1, must be kNone (0) with form = kDeepSeek, whose latents are "
            "normalised");
  o.qk_norm = QkNorm::kNone;
  o.nope_dim = INT64_MAX;
  EXPECT_EQ(message(o), "make_layer: nope_dim is 9223372036854775807, must be in 1..2147483647");
}

TEST(LayerRefusals, OptionsOfPlans) {
  const auto message = [](const PlanOptions& plan) {
    return make_layer(good_options(), {.batch = 1, .q_len = 4}, Device::cpu(), plan)
        .status()
        .message();
  };
  EXPECT_EQ(message({.backend = {}, .arithmetic = static_cast<Arithmetic>(9)}),
            "make_plan: options.arithmetic is 9, must be kExact (0) or kPlain (1)");
  EXPECT_EQ(message({.backend = {}, .softmax = static_cast<SoftmaxRule>(-3)}),
            "make_plan: options.softmax is -3, must be kAny (0) or kRunningMax (1)");
}

struct Call {
  TensorStore store;
  LayerForward<FusedWeights> forward;
  LayerBackward<FusedWeights> backward;

  Call() {
    forward.query = store.wave({1, 4, 8}, .37, .11, 1);
    forward.weights.qkv = store.wave({16, 8}, .71, .23, .6);
    forward.weights.out = store.wave({8, 8}, .53, .41, .6);
    forward.out = store.like(forward.query);
    backward.query = forward.query;
    backward.weights = forward.weights;
    backward.dout = store.like(forward.query);
  }
};

TEST(LayerRefusals, TensorsOfACall) {
  const auto plan = make_layer(good_options(), {.batch = 1, .q_len = 4, .use = LayerUse::kTraining},
                               Device::cpu());
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  const Scratch workspace(plan->workspace_bytes(Pass::kForward)), saved(plan->saved_bytes());
  const Scratch back(plan->workspace_bytes(Pass::kBackward));
  const auto forward = [&](const std::function<void(LayerForward<FusedWeights>&)>& set) {
    Call c;
    set(c.forward);
    return plan->forward(c.forward, workspace, saved).message();
  };
  using F = LayerForward<FusedWeights>;
  EXPECT_EQ(forward([](F&) {}), "");
  EXPECT_EQ(forward([](F& f) { f.query = {}; }), "forward: query is not given, must be given");
  EXPECT_EQ(forward([](F& f) { f.query.sizes[2] = 7; }),
            "forward: query.embed_dim is 7, must equal layer.embed_dim = 8");
  EXPECT_EQ(forward([](F& f) { f.weights.qkv.sizes[0] = 15; }),
            "forward: weights.qkv.(num_heads + 2 num_kv_heads) * head_dim is 15, must equal "
            "layer.(num_heads + 2 num_kv_heads) * head_dim = 16");
  EXPECT_EQ(forward([](F& f) { f.weights.out_bias = f.weights.out; }),
            "forward: weights.out_bias is given but options.bias is false");
  EXPECT_EQ(forward([](F& f) { f.weights.norm.q = f.weights.out; }),
            "forward: weights.norm.q is given but qk_norm is kNone");
  EXPECT_EQ(forward([](F& f) { f.query.dtype = DType::kF32; }),
            "forward: query.dtype is f32, must be f64");
  LayerCache cache;
  EXPECT_EQ(forward([&](F& f) { f.cache = &cache; }),
            "forward: cache is given but the plan's use is not kCached");
  const std::string alias = forward([](F& f) { f.out = f.query; });
  EXPECT_NE(alias.find("must not be that of query"), std::string::npos) << alias;

  Call c;
  EXPECT_EQ(plan->forward(c.forward, {}, saved).message(),
            "forward: workspace.data is null, must point to " +
                std::to_string(plan->workspace_bytes(Pass::kForward)) + " bytes");
  EXPECT_EQ(plan->forward(c.forward, workspace).message(),
            "forward: saved.data is null, must point to " + std::to_string(plan->saved_bytes()) +
                " bytes");
  c.backward.dkey = c.backward.query;
  EXPECT_EQ(plan->backward(c.backward, back, saved).message(),
            "backward: dkey is given but this layer attends to query itself: all is in dquery");
  c.backward.dkey = {};
  c.backward.dweights.out = c.store.blank({8, 7});
  EXPECT_EQ(plan->backward(c.backward, back, saved).message(),
            "backward: dweights.out.num_heads * head_dim is 7, must equal layer.num_heads * "
            "head_dim = 8");
}

TEST(LayerRefusals, ResultsThatCannotLend) {
  const auto plan = make_layer(good_options(),
                               {.batch = 1, .q_len = 4, .use = LayerUse::kTraining, .lends = true},
                               Device::cpu());
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  const Scratch workspace(plan->workspace_bytes(Pass::kForward)), saved(plan->saved_bytes());
  const Scratch back(plan->workspace_bytes(Pass::kBackward));
  const auto forward = [&](const std::function<void(Call&)>& set) {
    Call c;
    set(c);
    return plan->forward(c.forward, workspace, saved).message();
  };
  EXPECT_EQ(forward([](Call&) {}), "");
  EXPECT_EQ(forward([](Call& c) {
              c.forward.out = c.store.blank({1, 4, 9});
              c.forward.out.sizes[2] = 8;
            }),
            "forward: out.strides[1] is 9, must be 8: contiguous, for the plan's shape lends it");
  const std::string odd = forward([](Call& c) {
    c.forward.out.data = static_cast<double*>(c.store.blank({1, 4, 9}).data) + 1;
  });
  EXPECT_NE(odd.find("must be aligned to 64 bytes: the plan's shape lends it"), std::string::npos)
      << odd;
  const std::string overlap = forward([](Call& c) {
    c.forward.query.data = c.store.blank({2, 4, 8}).data;
    c.forward.out.data = static_cast<double*>(c.forward.query.data) + 8;
  });
  EXPECT_NE(overlap.find("must not overlap query: the plan's shape lends it"), std::string::npos)
      << overlap;
  const std::string positions = forward([](Call& c) {
    c.forward.position_ids =
        TensorView::contiguous(static_cast<double*>(c.forward.out.data) + 8, DType::kI32, {1, 4});
  });
  EXPECT_NE(positions.find("must not overlap position_ids"), std::string::npos) << positions;

  const auto backward = [&](const std::function<void(Call&)>& set) {
    Call c;
    c.backward.dquery = c.store.like(c.backward.query);
    c.backward.dweights.qkv = c.store.like(c.backward.weights.qkv);
    c.backward.dweights.out = c.store.like(c.backward.weights.out);
    set(c);
    return plan->backward(c.backward, back, saved).message();
  };
  EXPECT_EQ(backward([](Call&) {}), "");
  EXPECT_EQ(backward([](Call& c) { c.backward.dquery = {}; }),
            "backward: dquery is not given, must be given");
  EXPECT_EQ(backward([](Call& c) { c.backward.dweights.qkv = {}; }),
            "backward: dweights.qkv is not given, must be given");
}

TEST(LayerRefusals, BackwardNeedsATrainingPlan) {
  const auto plan = make_layer(good_options(), {.batch = 1, .q_len = 4}, Device::cpu());
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->saved_bytes(), 0u);
  Call c;
  EXPECT_EQ(plan->backward(c.backward, {}, {}).message(),
            "backward: shape.use is kInference, must be kTraining for a backward pass");
}

TEST(LayerRefusals, AFullCache) {
  GroupedQueryOptions o = good_options();
  o.max_seq_len = 6;
  const auto plan =
      make_layer(o, {.batch = 1, .q_len = 4, .use = LayerUse::kCached}, Device::cpu());
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  const Scratch workspace(plan->workspace_bytes(Pass::kForward)), memory(plan->cache_bytes());
  LayerCache cache = plan->cache_in(memory.data);
  Call c;
  EXPECT_EQ(plan->forward(c.forward, workspace).message(),
            "forward: cache is not given but the plan's use is kCached");
  c.forward.cache = &cache;
  const Status first = plan->forward(c.forward, workspace);
  EXPECT_TRUE(first.ok()) << first.message();
  EXPECT_EQ(cache.length, 4);
  EXPECT_EQ(plan->forward(c.forward, workspace).message(),
            "forward: cache.length is 4, must be in 0..2: max_seq_len = 6, and 4 tokens are added");
  EXPECT_EQ(cache.length, 4);  // a call that is refused adds nothing
}

}  // namespace
}  // namespace fovea::test
