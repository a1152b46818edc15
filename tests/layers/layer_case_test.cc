// Layers as the benchmark meets them: their text, their tensors, and the check of their outputs.
#include <gtest/gtest.h>

#include <cmath>

#include "harness/any_layer.h"
#include "harness/layer_comparison.h"
#include "harness/layer_weights.h"

namespace fovea::test {
namespace {

using namespace fovea::harness;

constexpr const char* kEveryLayer[] = {"layer=mha e=24 hq=3 b=2 q=19",
                                       "layer=self e=24 hq=3 b=2 q=19 position=none",
                                       "layer=gqa e=24 hq=4 hkv=2 d=8 b=2 q=19",
                                       "layer=mqa e=24 hq=3 b=2 q=19",
                                       "layer=latent e=24 hq=3 b=2 q=19",
                                       "layer=ccgqa e=64 hq=4 hkv=2 b=2 q=19",
                                       "layer=ccgqa preset=zaya e=24 hq=4 hkv=2 d=8 b=2 q=19"};

LayerCase parsed(const std::string& text) {
  const Result<LayerCase> c = parse_layer_case(text);
  EXPECT_TRUE(c.ok()) << text << ": " << c.status().message();
  return c.ok() ? *c : LayerCase{};
}

TEST(LayerCaseText, ParsesBackToTheSameCase) {
  for (const std::string text : kEveryLayer) {
    for (const char* more :
         {"", " dtype=bf16 pass=fwd,fwd+bwd seed=7", " dtype=f16 pass=fwd+bwd"}) {
      const LayerCase c = parsed(text + more);
      EXPECT_EQ(parsed(format_case(c)), c) << format_case(c);
      const Result<AnyCase> any = parse_any_case(text + more);
      ASSERT_TRUE(any.ok());
      EXPECT_EQ(std::get<LayerCase>(*any), c);
    }
  }
  const Result<AnyCase> problem = parse_any_case("q=8 d=16");
  ASSERT_TRUE(problem.ok());
  EXPECT_TRUE(std::holds_alternative<Case>(*problem)) << "no key layer: the operator";
}

TEST(LayerCaseText, FillsInHeadsAndTheirWidth) {
  EXPECT_EQ(format_case(parsed("layer=gqa e=512 hq=8 hkv=2 q=64")),
            "layer=gqa e=512 b=1 hq=8 hkv=2 q=64 d=64 dtype=f32 pass=fwd");
  EXPECT_EQ(parsed("layer=mqa e=512 hq=8 q=64").head_kv, 1);
  EXPECT_EQ(parsed("layer=latent e=512 hq=8 q=64").head_kv, 8);
  EXPECT_EQ(parsed("layer=ccgqa e=512 hq=8 hkv=2 q=64").head_dim, 16) << "compressed four times";
}

TEST(LayerCaseText, IsRefusedWithTheKeyAndItsValue) {
  struct Wrong {
    const char* text;
    const char* message;
  };
  for (const Wrong& wrong :
       {Wrong{"layer=gqa e=512 hq=8", "q is missing"}, Wrong{"layer=gqa q=8 hq=8", "e is missing"},
        Wrong{"layer=gru e=8 q=8", "layer is gru, must be one of mha, self, gqa"},
        Wrong{"layer=gqa e=8 q=8 kv=9", "kv is not a key"},
        Wrong{"layer=gqa e=8 q=8 pass=bwd", "pass is bwd, must be fwd, fwd+bwd"},
        Wrong{"layer=mha e=8 q=8 hq=4 hkv=2", "hkv is 2, must be 4 for layer=mha"},
        Wrong{"layer=mqa e=8 q=8 hq=4 hkv=4", "hkv is 4, must be 1 for layer=mqa"},
        Wrong{"layer=gqa e=10 q=8 hq=4", "e is 10, must be a multiple of 4"},
        Wrong{"layer=gqa e=10 q=8 hq=0", "hq is 0"}}) {
    const Result<AnyCase> c = parse_any_case(wrong.text);
    ASSERT_FALSE(c.ok()) << wrong.text;
    EXPECT_EQ(c.status().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(c.status().message().find(wrong.message), std::string::npos) << c.status().message();
  }
}

// The projections of a GQA layer, counted by hand: [(4 + 2 * 2) * 8, 24] and [24, 4 * 8].
TEST(LayerWeights, CountsTheMultiplyAddsOfAToken) {
  EXPECT_EQ(weight_macs(parsed("layer=gqa e=24 hq=4 hkv=2 d=8 q=19")), 64 * 24 + 24 * 32);
}

// One training step over all the case's tensors, gradients from the part that is checked.
Status train(const LayerCase& c, const LayerTensors& tensors) {
  const auto layer = make_any_layer(c, LayerUse::kTraining, Device::cpu());
  if (!layer.ok()) return layer.status();
  LayerViews views = tensors.views();
  views.dout = views.sampled_dout;
  const OwnedWorkspace forward((*layer)->workspace_bytes(Pass::kForward));
  const OwnedWorkspace backward((*layer)->workspace_bytes(Pass::kBackward));
  const OwnedWorkspace saved((*layer)->saved_bytes());
  const Saved kept{saved.view().data, saved.view().bytes};
  if (Status s = (*layer)->forward(views, forward.view(), kept, {}); !s.ok()) return s;
  return (*layer)->backward(views, backward.view(), kept, {});
}

bool all_ok(const std::vector<Accuracy>& found) {
  bool ok = !found.empty();
  for (const Accuracy& a : found) ok = ok && a.ok;
  return ok;
}

// The whole layer's outputs are right on the part that is compared, in f64 to the last digits:
// neither later tokens nor other sequences reach it.
TEST(LayerComparison, HoldsForEveryLayer) {
  for (const std::string text : kEveryLayer) {
    for (const char* dtype : {" dtype=f64", " dtype=bf16"}) {
      const LayerCase c = parsed(text + dtype + " pass=fwd,fwd+bwd");
      constexpr int64_t kSample = 11;
      LayerTensors tensors(c, kSample);
      LayerComparison comparison(c, tensors, kSample);
      EXPECT_FALSE(all_ok(comparison.forward())) << "poison: " << format_case(c);
      const Status done = train(c, tensors);
      ASSERT_TRUE(done.ok()) << format_case(c) << ": " << done.message();
      for (const Accuracy& a : comparison.training()) {
        EXPECT_TRUE(a.ok) << format_case(c) << ": " << a.tensor << " off by " << a.max_err
                          << ", bound " << a.bound;
      }
    }
  }
}

TEST(LayerComparison, SeesOneWrongElementOfAnyOutput) {
  const LayerCase c = parsed("layer=ccgqa e=64 hq=4 hkv=2 b=2 q=19 pass=fwd+bwd");
  LayerTensors tensors(c, 11);
  LayerComparison comparison(c, tensors, 11);
  ASSERT_TRUE(train(c, tensors).ok());
  ASSERT_TRUE(all_ok(comparison.training()));
  LayerViews views = tensors.views();
  std::vector<TensorView> outputs = {views.out, views.dx};
  for (const LayerWeight& w : views.weights) outputs.push_back(w.gradient);
  for (const TensorView& output : outputs) {
    const double right = read_element(output, 0);
    for (const double wrong : {right + 1, std::nan("")}) {
      write_element(output, wrong, 0);
      EXPECT_FALSE(all_ok(comparison.training()));
    }
    write_element(output, right, 0);
  }
  EXPECT_TRUE(all_ok(comparison.training()));
}

TEST(LayerComparison, TakesAsManyTokensAsCanBeAfforded) {
  const LayerCase c = parsed("layer=gqa e=24 hq=4 hkv=2 d=8 q=4096");
  const double token = 3 * weight_macs(c);
  EXPECT_EQ(sample_tokens(c, 100 * token), 100);
  EXPECT_EQ(sample_tokens(c, 1e6 * token), 512) << "a sample stays small";
  EXPECT_EQ(sample_tokens(c, 7 * token), 0) << "too few to say anything";
  EXPECT_EQ(sample_tokens(parsed("layer=gqa e=24 hq=4 hkv=2 d=8 q=5"), 100 * token), 5);
}

}  // namespace
}  // namespace fovea::test
