// A layer planned for plain arithmetic: every sum is one running sum in order, each product and
// each addition rounded to f32. It is the yardstick of other engines' layers, so it must not err
// less than that.
#include "layers/layer_trial.h"

namespace fovea::test {
namespace {

// Rounded by itself, whatever the compiler would fuse it with.
float product(double a, double b) {
  const volatile float rounded = static_cast<float>(a) * static_cast<float>(b);
  return rounded;
}

// x weight[row]^T + bias[row]
float projected(const std::vector<float>& x, const TensorView& weight, const TensorView& bias,
                int64_t row) {
  float sum = 0;
  const auto depth = static_cast<int64_t>(x.size());
  for (int64_t i = 0; i < depth; ++i) {
    sum += product(x[static_cast<size_t>(i)], element(weight, row * depth + i));
  }
  return sum + static_cast<float>(element(bias, row));
}

// One key to a token: attention gives its value, and all that is left are the projections.
TEST(PlainSums, RunInOrder) {
  constexpr int64_t kRows = 50, kEmbed = 300, kDim = 64;
  SelfAttentionOptions options;
  options.embed_dim = kEmbed;
  options.num_heads = 1;
  options.head_dim = kDim;
  options.dtype = DType::kF32;
  const LayerShape shape{.batch = kRows, .q_len = 1, .use = LayerUse::kTraining};
  const auto plan = make_layer(options, shape, Device::cpu(), kPlainFormula);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  TensorStore store(DType::kF32);
  LayerInputs in;
  in.query = store.normal({kRows, 1, kEmbed}, 1);
  FusedWeights w;
  w.qkv = store.normal({3 * kDim, kEmbed}, 1);
  w.qkv_bias = store.normal({3 * kDim}, 1);
  w.out = store.normal({kEmbed, kDim}, 1);
  w.out_bias = store.normal({kEmbed}, 1);
  Trial<FusedWeights> trial(*plan, store, in, w);
  trial.run();
  for (int64_t t = 0; t < kRows; ++t) {
    std::vector<float> x(kEmbed), v(kDim);
    for (int64_t i = 0; i < kEmbed; ++i) {
      x[static_cast<size_t>(i)] = static_cast<float>(element(in.query, t * kEmbed + i));
    }
    for (int64_t i = 0; i < kDim; ++i) {
      v[static_cast<size_t>(i)] = projected(x, w.qkv, w.qkv_bias, 2 * kDim + i);
    }
    for (int64_t i = 0; i < kEmbed; ++i) {
      ASSERT_EQ(element(trial.call.out, t * kEmbed + i), projected(v, w.out, w.out_bias, i))
          << "token " << t << ", channel " << i;
    }
  }
  for (int64_t i = 0; i < kEmbed; ++i) {
    float sum = 0;
    for (int64_t t = 0; t < kRows; ++t) {
      sum += static_cast<float>(element(trial.back.dout, t * kEmbed + i));
    }
    ASSERT_EQ(element(trial.back.dweights.out_bias, i), sum) << "gradient of bias " << i;
  }
}

}  // namespace
}  // namespace fovea::test
