// Checks of CCGQA's options and weights, and the convolutions' view of them.
#include "layers/ccgqa_weights.h"

#include <algorithm>
#include <cmath>

#include "base/refusal.h"
#include "layers/check_options.h"

namespace fovea::layers {

Status check_ccgqa_options(const CcgqaOptions& o, const LayerShape& shape) {
  OptionCheck check;
  check.dtype(o.dtype);
  check.at_least("embed_dim", o.embed_dim, 1);
  check.at_least("num_heads", o.num_heads, 1);
  check.at_least("num_kv_heads", o.num_kv_heads, 1);
  if (check.ok()) check.multiple("num_heads", o.num_heads, "num_kv_heads", o.num_kv_heads);
  check.is(o.head_dim >= 1, "head_dim", show(o.head_dim),
           "be at least 1; hydra takes embed_dim / compression / num_heads, which must be whole");
  check.channels("head_dim", o.head_dim, 1);
  check.shape(shape, o.max_seq_len);
  check.attends_to_itself(shape);
  const auto known = [&](const char* name, auto value, auto last) {
    const auto n = static_cast<int64_t>(value);
    check.is(n >= 0 && n <= static_cast<int64_t>(last), name, show(n),
             "be in 0.." + show(static_cast<int64_t>(last)));
  };
  known("conv", o.conv, CcgqaConv::kChannelsThenHeads);
  known("coupling", o.coupling, CcgqaCoupling::kGroup);
  known("temperature", o.temperature, KeyTemperature::kPerHeadExp);
  constexpr int64_t kMostTaps = 64;
  for (const int64_t taps : o.conv_taps) {
    check.is(taps >= 1 && taps <= kMostTaps, "conv_taps", show(taps),
             "be in 1.." + show(kMostTaps));
  }
  check.is(!o.conv_bias || o.conv == CcgqaConv::kChannelsThenHeads, "conv_bias", "true",
           "be false with conv = kHeadsThenAll");
  check.window(o.sliding_window);
  check.scale(o.softmax_scale);
  check.finite("output_scale", o.output_scale);
  if (o.rope) check.rope(o.rotary, o.head_dim);
  check.extent("weights.qkv", {3, o.num_heads, o.head_dim, o.embed_dim});
  check.extent("weights.q_conv2", {o.num_heads, o.head_dim, o.num_heads, o.head_dim, kMostTaps});
  if (!check.ok()) return check.status();
  constexpr int64_t kMostRows = int64_t{1} << 57;                // far more than are taken
  const int64_t beyond = 2 * (o.conv_taps[0] + o.conv_taps[1]);  // rows that convolutions reach
  const int64_t rows = std::min(std::max(shape.q_len, o.max_seq_len), kMostRows) + beyond;
  check.extent("activations", {std::max<int64_t>(1, shape.batch), rows, 3, o.num_heads,
                               std::max(o.head_dim, o.embed_dim)});
  if (check.ok() && o.value_shift) {
    check.is(o.num_kv_heads * o.head_dim % 2 == 0, "num_kv_heads * head_dim",
             show(o.num_kv_heads * o.head_dim), "be even with value_shift: half of it is shifted");
  }
  return check.status();
}

void check_ccgqa_weights(CallCheck& check, CallCheck::Weights kind, const CcgqaOptions& o,
                         const CcgqaWeights& w) {
  const int64_t q_width = o.num_heads * o.head_dim, kv_width = o.num_kv_heads * o.head_dim;
  const Dim embed{"embed_dim", o.embed_dim}, dim{"head_dim", o.head_dim};
  const Dim q{"L", q_width}, kv{"KV", kv_width}, qk{"L + KV", q_width + kv_width};
  const Dim taps1{"conv_taps[0]", o.conv_taps[0]}, taps2{"conv_taps[1]", o.conv_taps[1]};
  check.weight(kind, "qkv", w.qkv, {{"L + 2 KV", q_width + 2 * kv_width}, embed});
  check.weight(kind, "out", w.out, {embed, q});
  struct One {
    const char* name;
    const TensorView& view;
    bool wanted;
    std::array<Dim, 3> dims;
  };
  const bool heads_first = o.convs && o.conv == CcgqaConv::kHeadsThenAll;
  const bool channels_first = o.convs && o.conv == CcgqaConv::kChannelsThenHeads;
  for (const One& one : {One{"q_conv1", w.q_conv1, heads_first, {q, dim, taps1}},
                         One{"q_conv2", w.q_conv2, heads_first, {q, q, taps2}},
                         One{"k_conv1", w.k_conv1, heads_first, {kv, dim, taps1}},
                         One{"k_conv2", w.k_conv2, heads_first, {kv, kv, taps2}},
                         One{"channel_conv", w.channel_conv, channels_first, {qk, {"1", 1}, taps1}},
                         One{"head_conv", w.head_conv, channels_first, {qk, dim, taps2}}}) {
    if (one.wanted) {
      check.dense_weight(kind, one.name, one.view, {one.dims[0], one.dims[1], one.dims[2]});
    } else {
      check.absent(one.name, one.view, o.convs ? "conv has no such weight" : "convs is false");
    }
  }
  for (const auto& [name, view] :
       {std::pair<const char*, const TensorView&>{"channel_conv_bias", w.channel_conv_bias},
        {"head_conv_bias", w.head_conv_bias}}) {
    if (channels_first && o.conv_bias) {
      check.weight(kind, name, view, {qk});
    } else {
      check.absent(name, view, "conv_bias is false, or convs is");
    }
  }
  if (o.qk_norm) {
    const bool shared = o.temperature == KeyTemperature::kShared;
    const Dim count = shared ? Dim{"1", 1} : Dim{"num_kv_heads", o.num_kv_heads};
    check.weight(kind, "temperature", w.temperature, {count});
  } else {
    check.absent("temperature", w.temperature, "qk_norm is false");
  }
}

void set_convs(const CcgqaOptions& o, const CcgqaWeights& w, Conv& first, Conv& second) {
  if (!o.convs) return;
  const int64_t q = o.num_heads * o.head_dim, kv = o.num_kv_heads * o.head_dim, dim = o.head_dim;
  first.taps = o.conv_taps[0];
  second.taps = o.conv_taps[1];
  if (o.conv == CcgqaConv::kHeadsThenAll) {
    first.blocks = second.blocks = 2;
    first.block = {{{0, q, dim, w.q_conv1, {}}, {q, kv, dim, w.k_conv1, {}}}};
    second.block = {{{0, q, q, w.q_conv2, {}}, {q, kv, kv, w.k_conv2, {}}}};
  } else {
    first.blocks = second.blocks = 1;
    first.block[0] = {0, q + kv, 1, w.channel_conv, w.channel_conv_bias};
    second.block[0] = {0, q + kv, dim, w.head_conv, w.head_conv_bias};
  }
}

}  // namespace fovea::layers
