// CCGQA of few tokens, whose attention and output's projection are one kernel on some GPUs.
#include <tuple>

#include "layer_samples.h"

namespace fovea::test {
namespace {

TEST_F(DeviceLayers, CcgqaOfFewTokens) {
  const auto scaled = [](CcgqaOptions options) {
    options.output_scale = 1.5;
    return options;
  };
  for (const auto& [options, batch, len] :
       {std::tuple{CcgqaOptions::hydra(512, 8, 2, 4), int64_t{4}, int64_t{1}},
        {CcgqaOptions::hydra(512, 8, 2, 4), int64_t{3}, int64_t{7}},
        {CcgqaOptions::hydra(512, 8, 2, 4), int64_t{2}, int64_t{9}},
        {CcgqaOptions::hydra(512, 8, 2, 4), int64_t{2}, int64_t{24}},
        {CcgqaOptions::hydra(512, 8, 1, 4), int64_t{3}, int64_t{45}},
        {CcgqaOptions::hydra(256, 8, 2, 2), int64_t{2}, int64_t{130}},
        {scaled(CcgqaOptions::hydra(384, 8, 2, 3)), int64_t{1}, int64_t{333}},
        {CcgqaOptions::hydra(512, 8, 2, 4), int64_t{1}, int64_t{512}},
        {CcgqaOptions::hydra(512, 8, 2, 4), int64_t{1}, int64_t{513}}}) {
    SCOPED_TRACE("width " + std::to_string(options.embed_dim) + ", " + std::to_string(len) +
                 " tokens");
    expect_layer_accurate(ccgqa(options, batch, len));
  }
}

CcgqaSample with_temperature(double temperature) {
  CcgqaSample sample = ccgqa(CcgqaOptions::hydra(512, 8, 2, 4), 2, 75);
  sample.weights = [weights = sample.weights, temperature](TensorStore& store) {
    const CcgqaWeights w = weights(store);
    set_element(w.temperature, 0, temperature);
    return w;
  };
  return sample;
}

// Logits far from what is believed of them, where weights that refer to 0 leave the range of
// floats.
TEST_F(DeviceLayers, CcgqaOfAnyTemperature) {
  for (const double temperature : {-1000.0, 0.0, 600.0}) {
    SCOPED_TRACE(temperature);
    expect_layer_accurate(with_temperature(temperature));
  }
}

// What a plan of forward alone gives, which keeps nothing, and may lie where its results will be.
TEST_F(DeviceLayers, CcgqaOfFewTokensWithoutBackward) {
  for (const DType dtype : {DType::kBf16, DType::kF16}) {
    CcgqaSample sample = ccgqa(CcgqaOptions::hydra(512, 8, 2, 4), 4, 512);
    TensorStore store(dtype);
    const LayerValues<CcgqaWeights> values(sample, store);
    auto kept = trial_of(plan_layer(sample, dtype, Device::cuda(0)), values, store);
    LayerOnDevice<CcgqaWeights>(kept).run();
    for (const bool lends : {false, true}) {
      sample.shape.use = LayerUse::kInference;
      sample.shape.lends = lends;
      auto alone = trial_of(plan_layer(sample, dtype, Device::cuda(0)), values, store);
      LayerOnDevice<CcgqaWeights>(alone).run();
      expect_same_bits(alone.call.out, kept.call.out, "out");
    }
  }
}

// A token that is not finite is seen by itself and those after it alone.
TEST_F(DeviceLayers, CcgqaHidesWhatIsNotFinite) {
  constexpr int64_t kBad = 40;
  const CcgqaSample sample = with_temperature(4);
  TensorStore store(DType::kBf16);
  const LayerValues<CcgqaWeights> values(sample, store);
  auto clean = trial_of(plan_layer(sample, DType::kBf16, Device::cuda(0)), values, store);
  LayerOnDevice<CcgqaWeights>(clean).run();
  const int64_t width = sample.options.embed_dim;
  set_element(values.in.query, kBad * width + 3, std::numeric_limits<double>::infinity());
  auto dirty = trial_of(plan_layer(sample, DType::kBf16, Device::cuda(0)), values, store);
  LayerOnDevice<CcgqaWeights>(dirty).run();
  for (int64_t i = 0; i < clean.call.out.elements(); ++i) {
    const double was = element(clean.call.out, i), is = element(dirty.call.out, i);
    const bool sees_it = i / width >= kBad && i / width < sample.shape.q_len;
    if (sees_it) {
      ASSERT_FALSE(std::isfinite(is)) << "at " << i;
    } else {
      ASSERT_NEAR(is, was, 0x1p-6 * (1 + std::abs(was))) << "at " << i;
    }
  }
}

}  // namespace
}  // namespace fovea::test
