// Shapes by kind of layer.
#include "harness/layer_weights.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

namespace fovea::harness {
namespace {

constexpr double kBiasDeviation = 0.1;

// A weight [out, in...]: values about as large as their sums leave the inputs.
WeightShape matrix(const char* name, std::vector<int64_t> sizes) {
  const int64_t fan_in =
      std::accumulate(sizes.begin() + 1, sizes.end(), int64_t{1}, std::multiplies<>());
  return {name, std::move(sizes), 1 / std::sqrt(static_cast<double>(fan_in))};
}

std::vector<WeightShape> latent_shapes(const LayerCase& c) {
  const int64_t e = c.embed_dim, wide = c.head_q * c.head_dim;
  const int64_t latent = std::max<int64_t>(16, e / 8);  // the default of LatentOptions
  return {matrix("q_down", {latent, e}),  matrix("q_up", {wide, latent}),
          matrix("kv_down", {latent, e}), matrix("k_up", {wide, latent}),
          matrix("v_up", {wide, latent}), matrix("out", {e, wide})};
}

std::vector<WeightShape> ccgqa_shapes(const LayerCase& c) {
  const int64_t e = c.embed_dim, d = c.head_dim, q = c.head_q * d, kv = c.head_kv * d;
  std::vector<WeightShape> shapes = {matrix("qkv", {q + 2 * kv, e}), matrix("out", {e, q})};
  if (c.preset == CcgqaPreset::kHydra) {
    shapes.insert(shapes.end(), {matrix("q_conv1", {q, d, 3}),
                                 matrix("q_conv2", {q, q, 3}),
                                 matrix("k_conv1", {kv, d, 3}),
                                 matrix("k_conv2", {kv, kv, 3}),
                                 {"temperature", {1}, 0, std::sqrt(static_cast<double>(d))}});
  } else {
    shapes.insert(shapes.end(), {matrix("channel_conv", {q + kv, 1, 2}),
                                 matrix("head_conv", {q + kv, d, 2}),
                                 {"channel_conv_bias", {q + kv}, kBiasDeviation},
                                 {"head_conv_bias", {q + kv}, kBiasDeviation},
                                 {"temperature", {c.head_kv}, 0, 0.0}});
  }
  return shapes;
}

}  // namespace

std::vector<WeightShape> weight_shapes(const LayerCase& c) {
  const int64_t e = c.embed_dim, q = c.head_q * c.head_dim, kv = c.head_kv * c.head_dim;
  switch (c.kind) {
    case LayerKind::kMultiHead:
      return {matrix("q", {q, e}), matrix("k", {q, e}), matrix("v", {q, e}), matrix("out", {e, q})};
    case LayerKind::kSelf:
    case LayerKind::kGrouped:
    case LayerKind::kMultiQuery: return {matrix("qkv", {q + 2 * kv, e}), matrix("out", {e, q})};
    case LayerKind::kLatent: return latent_shapes(c);
    case LayerKind::kCcgqa: return ccgqa_shapes(c);
  }
  return {};
}

double weight_macs(const LayerCase& c) {
  double macs = 0;
  for (const WeightShape& w : weight_shapes(c)) {
    if (w.sizes.size() < 2) continue;  // biases and temperatures are added or multiplied once
    macs += static_cast<double>(
        std::accumulate(w.sizes.begin(), w.sizes.end(), int64_t{1}, std::multiplies<>()));
  }
  return macs;
}

}  // namespace fovea::harness
