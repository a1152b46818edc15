// Options and weights of the layers that tests on a GPU are about.
#include "layer_samples.h"

#include "backend/cuda/device.h"

namespace fovea::test {
namespace {

QkNormWeights norm_weights(TensorStore& store, QkNorm kind, int64_t dim) {
  QkNormWeights norm;
  if (kind == QkNorm::kNone) return norm;
  norm.q = store.wave({dim}, .3, 1.2, 1);
  norm.k = store.wave({dim}, .4, 1.1, 1);
  if (kind != QkNorm::kLayer) return norm;
  norm.q_bias = store.wave({dim}, .5, .2, .3);
  norm.k_bias = store.wave({dim}, .6, .1, .3);
  return norm;
}

}  // namespace

void DeviceLayers::SetUp() {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device on this machine";
  SelfAttentionOptions any;
  any.embed_dim = any.num_heads = any.head_dim = 8;
  const Status made = make_layer(any, {.batch = 1, .q_len = 1}, Device::cuda(0)).status();
  const bool without_blas = made.message().find("cublasLt") != std::string::npos;
  if (without_blas) GTEST_SKIP() << made.message();
}

GroupedSample grouped(const GroupedSizes& s, const std::function<void(GroupedQueryOptions&)>& set) {
  GroupedSample sample;
  GroupedQueryOptions& o = sample.options;
  o.embed_dim = s.embed;
  o.num_heads = s.heads;
  o.num_kv_heads = s.heads_kv;
  o.head_dim = s.dim;
  o.max_seq_len = s.len + 3;
  set(o);
  sample.shape = {.batch = s.batch, .q_len = s.len, .use = LayerUse::kTraining};
  sample.weights = [o, s](TensorStore& store) {
    const int64_t width = (s.heads + 2 * s.heads_kv) * s.dim;
    FusedWeights w;
    w.qkv = store.normal({width, s.embed}, weight_scale(s.embed));
    w.out = store.normal({s.embed, s.heads * s.dim}, weight_scale(s.heads * s.dim));
    if (o.bias) {
      w.qkv_bias = store.normal({width}, .1);
      w.out_bias = store.normal({s.embed}, .1);
    }
    w.norm = norm_weights(store, o.qk_norm, s.dim);
    return w;
  };
  sample.inputs = [](TensorStore&, LayerInputs& in) { in.dropout = {5, 9}; };
  return sample;
}

LatentSample latent(const LatentDims& s, const std::function<void(LatentOptions&)>& set) {
  LatentSample sample;
  LatentOptions& o = sample.options;
  o.embed_dim = s.embed;
  o.num_heads = s.heads;
  o.q_latent = s.q_latent;
  o.kv_latent = s.kv_latent;
  o.causal = true;
  o.max_seq_len = 64;
  if (s.rope > 0) {
    o.form = LatentForm::kDeepSeek;
    o.nope_dim = s.nope;
    o.rope_dim = s.rope;
    o.v_dim = s.v;
    o.position = Position::kRope;
  } else {
    o.head_dim = s.nope;
  }
  set(o);
  sample.shape = {.batch = 2, .q_len = 41, .use = LayerUse::kTraining};
  sample.weights = [s, norm = o.qk_norm](TensorStore& store) {
    LatentWeights w;
    w.q_down = store.normal({s.q_latent, s.embed}, weight_scale(s.embed));
    w.q_up = store.normal({s.heads * (s.nope + s.rope), s.q_latent}, weight_scale(s.q_latent));
    w.kv_down = store.normal({s.kv_latent + s.rope, s.embed}, weight_scale(s.embed));
    w.k_up = store.normal({s.heads * s.nope, s.kv_latent}, weight_scale(s.kv_latent));
    w.v_up = store.normal({s.heads * s.v, s.kv_latent}, weight_scale(s.kv_latent));
    w.out = store.normal({s.embed, s.heads * s.v}, weight_scale(s.heads * s.v));
    if (s.rope > 0) {
      w.q_latent_norm = store.wave({s.q_latent}, .3, 1.2, 1);
      w.kv_latent_norm = store.wave({s.kv_latent}, .4, 1.1, 1);
    }
    w.norm = norm_weights(store, norm, s.nope);
    return w;
  };
  return sample;
}

CcgqaSample ccgqa(const CcgqaOptions& options, int64_t batch, int64_t len) {
  CcgqaSample sample;
  sample.options = options;
  sample.options.max_seq_len = len + 2;
  sample.shape = {.batch = batch, .q_len = len, .use = LayerUse::kTraining};
  sample.weights = [o = options](TensorStore& store) {
    const int64_t d = o.head_dim, q = o.num_heads * d, kv = o.num_kv_heads * d;
    const int64_t taps1 = o.conv_taps[0], taps2 = o.conv_taps[1];
    CcgqaWeights w;
    w.qkv = store.normal({q + 2 * kv, o.embed_dim}, weight_scale(o.embed_dim));
    w.out = store.normal({o.embed_dim, q}, weight_scale(q));
    if (o.convs && o.conv == CcgqaConv::kHeadsThenAll) {
      w.q_conv1 = store.normal({q, d, taps1}, weight_scale(d * taps1));
      w.q_conv2 = store.normal({q, q, taps2}, weight_scale(q * taps2));
      w.k_conv1 = store.normal({kv, d, taps1}, weight_scale(d * taps1));
      w.k_conv2 = store.normal({kv, kv, taps2}, weight_scale(kv * taps2));
    } else if (o.convs) {
      w.channel_conv = store.normal({q + kv, 1, taps1}, weight_scale(taps1));
      w.head_conv = store.normal({q + kv, d, taps2}, weight_scale(d * taps2));
    }
    if (o.convs && o.conv_bias) {
      w.channel_conv_bias = store.normal({q + kv}, .1);
      w.head_conv_bias = store.normal({q + kv}, .1);
    }
    if (!o.qk_norm) return w;
    w.temperature = o.temperature == KeyTemperature::kShared
                        ? store.wave({1}, 0, 1, std::sqrt(static_cast<double>(d)))
                        : store.normal({o.num_kv_heads}, .2);
    return w;
  };
  return sample;
}

}  // namespace fovea::test
