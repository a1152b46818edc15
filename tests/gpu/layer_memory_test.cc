// What a CCGQA layer needs besides its results: less than what it stands in for.
#include <algorithm>

#include "layer_samples.h"
#include "plan/device.h"

namespace fovea::test {
namespace {

// On one H200 in bf16, MiB that PyTorch needs besides what it returns: for CCGQA's formula, and for
// the GQA layer on cuDNN.
struct Peers {
  int64_t embed, heads, heads_kv, batch, len;
  double formula, grouped;
};
constexpr Peers kPeers[] = {
    {512, 8, 2, 4, 512, 4.41, 16.31},    {512, 8, 2, 4, 1024, 9.11, 31.5},
    {512, 8, 2, 4, 2048, 19.5, 63.75},   {512, 8, 2, 4, 4096, 37.3, 128.25},
    {512, 8, 2, 4, 8192, 76.95, 258},    {512, 8, 2, 4, 16384, 150.2, 515},
    {2048, 16, 4, 4, 2048, 69.9, 245},   {2048, 16, 4, 4, 4096, 143.6, 503},
    {2048, 16, 4, 4, 8192, 289.8, 1016}, {2048, 16, 4, 4, 16384, 584.3, 2044},
    {4096, 32, 8, 1, 2048, 19.2, 80.4},  {4096, 32, 8, 1, 4096, 56, 209},
    {4096, 32, 8, 1, 8192, 129.7, 467},  {4096, 32, 8, 1, 16384, 275.9, 980},
};

TEST_F(DeviceLayers, CcgqaNeedsAThirdOfTheMemoryOfGroupedQuery) {
  const auto device = discover(Device::cuda(0), {});
  ASSERT_TRUE(device.ok());
  if (device->gpu.sm != 90 || device->gpu.sm_count != 132) GTEST_SKIP() << "not an H200";
  for (const Peers& peers : kPeers) {
    SCOPED_TRACE("width " + std::to_string(peers.embed) + ", " + std::to_string(peers.len));
    CcgqaOptions options = CcgqaOptions::hydra(peers.embed, peers.heads, peers.heads_kv);
    options.dtype = DType::kBf16;
    const auto plan = make_layer(options,
                                 {.batch = peers.batch,
                                  .q_len = peers.len,
                                  .use = LayerUse::kTraining,
                                  .lends = true,
                                  .spends = true},
                                 Device::cuda(0));
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    const size_t workspace =
        std::max(plan->workspace_bytes(Pass::kForward), plan->workspace_bytes(Pass::kBackward));
    const double mib = static_cast<double>(plan->saved_bytes() + workspace) / (1 << 20);
    EXPECT_LE(mib, std::min(peers.formula, peers.grouped / 3));
  }
}

double relative_difference(const TensorView& a, const TensorView& b) {
  double apart = 0, length = 0;
  for (int64_t i = 0; i < a.elements(); ++i) {
    const double x = element(a, i), difference = x - element(b, i);
    apart += difference * difference;
    length += x * x;
  }
  return std::sqrt(apart / length);
}

// As many tokens as have the first convolution made again: by products, and by tiles; and by tiles
// a few less.
TEST_F(DeviceLayers, CcgqaOfManyTokensMayLend) {
  struct Shape {
    CcgqaOptions options;
    int64_t batch, len;
  };
  for (const Shape& shape : {Shape{CcgqaOptions::hydra(1024, 8, 2), 2, 7000},
                             {CcgqaOptions::hydra(128, 8, 2, 1), 16, 6600},
                             {CcgqaOptions::hydra(512, 8, 2), 4, 7000}}) {
    SCOPED_TRACE("width " + std::to_string(shape.options.embed_dim));
    CcgqaSample sample = ccgqa(shape.options, shape.batch, shape.len);
    TensorStore store(DType::kBf16);
    const LayerValues<CcgqaWeights> values(sample, store);
    auto kept = trial_of(plan_layer(sample, DType::kBf16, Device::cuda(0)), values, store);
    sample.shape.lends = sample.shape.spends = true;
    auto lent = trial_of(plan_layer(sample, DType::kBf16, Device::cuda(0)), values, store);
    LayerOnDevice<CcgqaWeights>(kept).run();
    LayerOnDevice<CcgqaWeights>(lent).run();
    expect_same_bits(lent.call.out, kept.call.out, "out");
    const auto want = results_of(kept), got = results_of(lent);
    for (size_t n = 0; n < want.size(); ++n) {  // sums may be in another order
      EXPECT_LE(relative_difference(want[n].view, got[n].view), 0x1p-7) << want[n].name;
    }
  }
}

// Tiles whose weights' gradients are products over many rows, which have other ways for addresses
// that they do not take.
TEST_F(DeviceLayers, CcgqaOfManyHeadsTakesAnyAddress) {
  const CcgqaSample sample = ccgqa(CcgqaOptions::hydra(256, 16, 4, 1), 2, 1100);
  TensorStore store(DType::kBf16);
  const LayerValues<CcgqaWeights> values(sample, store);
  const auto moved = [&](const char*, TensorView& t) {
    if (!t.given()) return;
    TensorView odd = t;
    odd.data = static_cast<std::byte*>(store.blank({t.elements() + 1}).data) + dtype_bytes(t.dtype);
    for (int64_t i = 0; i < t.elements(); ++i) set_element(odd, i, element(t, i));
    t = odd;
  };
  auto even = trial_of(plan_layer(sample, DType::kBf16, Device::cuda(0)), values, store);
  LayerOnDevice<CcgqaWeights>(even).run();
  for (const auto& [weights, gradients] : {std::pair{false, true}, {true, false}, {true, true}}) {
    SCOPED_TRACE(weights ? gradients ? "weights and gradients" : "weights" : "gradients");
    auto odd = trial_of(plan_layer(sample, DType::kBf16, Device::cuda(0)), values, store);
    if (weights) visit(odd.call.weights, moved), odd.back.weights = odd.call.weights;
    if (gradients) visit(odd.back.dweights, moved);
    LayerOnDevice<CcgqaWeights>(odd).run();
    const auto want = results_of(even), got = results_of(odd);
    for (size_t n = 0; n < want.size(); ++n) {
      EXPECT_LE(relative_difference(want[n].view, got[n].view), 0x1p-7) << want[n].name;
    }
  }
}

}  // namespace
}  // namespace fovea::test
