// Mistakes that layers elsewhere were known for, and must not make here.
#include "layers/layer_trial.h"

namespace fovea::test::habits {
namespace {

constexpr int64_t kBatch = 2, kLen = 6, kEmbed = 8, kHeads = 2, kDim = 4;

GroupedQueryOptions options_of(bool causal = true) {
  GroupedQueryOptions o;
  o.embed_dim = kEmbed;
  o.num_heads = kHeads;
  o.num_kv_heads = 1;
  o.dtype = DType::kF64;
  o.causal = causal;
  o.bias = false;
  o.max_seq_len = kLen;
  return o;
}

struct OneLayer {
  TensorStore store;
  LayerForward<FusedWeights> call;

  OneLayer() {
    call.query = store.wave({kBatch, kLen, kEmbed}, .37, .11, 1);
    call.weights.qkv = store.wave({(kHeads + 2) * kDim, kEmbed}, .71, .23, .6);
    call.weights.out = store.wave({kEmbed, kHeads * kDim}, .53, .41, .6);
    call.out = store.like(call.query);
  }
  Status run(const GroupedQueryOptions& options, bool masked = false) {
    auto plan =
        make_layer(options, {.batch = kBatch, .q_len = kLen, .masked = masked}, Device::cpu());
    if (!plan.ok()) return plan.status();
    return plan->forward(call, Scratch(plan->workspace_bytes(Pass::kForward)));
  }
  TensorView output(const GroupedQueryOptions& options, bool masked = false) {
    call.out = store.like(call.query);
    const Status done = run(options, masked);
    EXPECT_TRUE(done.ok()) << done.message();
    return call.out;
  }
};

TEST(LayerHabits, CalledAsLayerOfXXXIsSelfAttention) {
  OneLayer s;
  const TensorView plain = s.output(options_of());
  s.call.key = s.call.value = s.call.query;
  expect_same_bits(s.output(options_of()), plain, "layer(x, x, x)");
}

TEST(LayerHabits, AnotherTensorIsNeitherKeyNorMask) {
  OneLayer s;
  s.call.key = s.store.wave({kBatch, kLen, kEmbed}, .1, .1, 1);
  EXPECT_EQ(s.run(options_of()).message(),
            "forward: key is given but is not query: this layer attends to query itself");
  s.call.key = {};
  s.call.mask = s.call.query;
  EXPECT_EQ(s.run(options_of()).message(),
            "forward: mask is given but the plan's shape has no mask");
  EXPECT_EQ(s.run(options_of(), /*masked=*/true).message(), "forward: mask.rank is 3, must be 4");
}

TEST(LayerHabits, AWindowHidesAndNothingIsNaN) {
  OneLayer s;
  GroupedQueryOptions one = options_of();
  one.sliding_window = 1;
  const TensorView alone = s.output(one);
  for (int64_t i = 0; i < alone.elements(); ++i) EXPECT_TRUE(std::isfinite(element(alone, i)));
  // A token that sees itself alone gives its own value: the same wherever it stands.
  OneLayer shuffled;
  for (int64_t i = 0; i < kLen * kEmbed; ++i) {
    const int64_t from = (kLen - 1 - i / kEmbed) * kEmbed + i % kEmbed;
    set_element(shuffled.call.query, i, element(s.call.query, from));
  }
  const TensorView moved = shuffled.output(one);
  for (int64_t i = 0; i < kLen * kEmbed; ++i) {
    const int64_t from = (kLen - 1 - i / kEmbed) * kEmbed + i % kEmbed;
    EXPECT_EQ(element(moved, i), element(alone, from));
  }
}

// mask = true means "takes part": padding at the end is as if it were not there.
TEST(LayerHabits, APaddingMaskKeepsWhatIsTrue) {
  for (const bool as_scores : {false, true}) {
    OneLayer s, other;
    constexpr int64_t kReal = 4;
    const TensorView mask = as_scores ? s.store.bytes(DType::kBool, {kBatch, 1, 1, kLen})
                                      : s.store.bytes(DType::kBool, {kBatch, kLen});
    for (int64_t i = 0; i < kBatch * kLen; ++i) {
      static_cast<bool*>(mask.data)[i] = i % kLen < kReal;
      for (int64_t c = 0; i % kLen >= kReal && c < kEmbed; ++c) {
        set_element(other.call.query, i * kEmbed + c, 100);
      }
    }
    s.call.mask = other.call.mask = mask;
    const TensorView a = s.output(options_of(false), true);
    const TensorView b = other.output(options_of(false), true);
    for (int64_t i = 0; i < a.elements(); ++i) {
      if (i / kEmbed % kLen < kReal) {
        EXPECT_EQ(element(a, i), element(b, i));
      }
    }
  }
}

TEST(LayerHabits, ARowThatSeesNothingIsZero) {
  OneLayer s;
  s.call.mask = s.store.bytes(DType::kBool, {kBatch, kLen});  // all false
  const TensorView out = s.output(options_of(), true);
  for (int64_t i = 0; i < out.elements(); ++i) EXPECT_EQ(element(out, i), 0);
}

// RoPE sees distances alone, so that a sequence may stand anywhere.
TEST(LayerHabits, PositionIdsMoveTheWholeSequence) {
  OneLayer s;
  GroupedQueryOptions o = options_of();
  o.position = Position::kRope;
  const TensorView plain = s.output(o);
  const auto ids = [&](int64_t first) {
    const TensorView t = s.store.bytes(DType::kI32, {1, kLen});
    for (int64_t i = 0; i < kLen; ++i) {
      static_cast<int32_t*>(t.data)[i] = static_cast<int32_t>(first + i);
    }
    return t;
  };
  s.call.position_ids = ids(0);
  expect_same_bits(s.output(o), plain, "the usual positions");
  s.call.position_ids = ids(100000);
  const TensorView far = s.output(o);
  EXPECT_LT(largest_difference(far, plain), 1e-10);
  s.call.position_ids = ids(0);
  static_cast<int32_t*>(s.call.position_ids.data)[kLen - 1] = 50;
  EXPECT_GT(largest_difference(s.output(o), plain), 1e-6);
}

TEST(LayerHabits, AlibiIsTheBiasOfTheOperatorOnce) {
  OneLayer s;
  GroupedQueryOptions o = options_of();
  const TensorView plain = s.output(o);
  o.position = Position::kAlibi;
  auto plan = make_layer(o, {.batch = kBatch, .q_len = kLen}, Device::cpu());
  ASSERT_TRUE(plan.ok());
  EXPECT_TRUE(has(plan->attention().problem().features, Feature::kAlibi));
  const TensorView with = s.output(o);
  // The first token sees itself alone; the others see their past, further away.
  for (int64_t i = 0; i < kEmbed; ++i) EXPECT_NEAR(element(with, i), element(plain, i), 1e-15);
  EXPECT_GT(largest_difference(with, plain), 1e-6);
}

// The sequence-first layout is a matter of strides.
TEST(LayerHabits, SequenceFirstIsAView) {
  OneLayer s;
  const TensorView plain = s.output(options_of());
  const TensorView turned = s.store.blank({kLen, kBatch, kEmbed});
  const TensorView out = s.store.blank({kLen, kBatch, kEmbed});
  const auto at = [&](int64_t b, int64_t i, int64_t c) { return (i * kBatch + b) * kEmbed + c; };
  for (int64_t n = 0; n < plain.elements(); ++n) {
    set_element(turned, at(n / kEmbed / kLen, n / kEmbed % kLen, n % kEmbed),
                element(s.call.query, n));
  }
  const auto view = [&](const TensorView& t) {
    return TensorView::strided(t.data, DType::kF64, {kBatch, kLen, kEmbed},
                               {kEmbed, kBatch * kEmbed, 1});
  };
  s.call.query = view(turned);
  s.call.out = view(out);
  const Status done = s.run(options_of());
  ASSERT_TRUE(done.ok()) << done.message();
  for (int64_t n = 0; n < plain.elements(); ++n) {
    EXPECT_EQ(element(out, at(n / kEmbed / kLen, n / kEmbed % kLen, n % kEmbed)),
              element(plain, n));
  }
}

}  // namespace
}  // namespace fovea::test::habits
