// Asks every layer whether it can be made, in each type and for each use.
#include <functional>
#include <vector>

#include "cli/support.h"
#include "fovea/layers.h"

namespace fovea::cli {
namespace {

struct LayerProbe {
  const char* layer;
  std::function<Status(DType, LayerUse)> ask;
};

template <typename Options>
LayerProbe probe(const char* layer, Options options) {
  return {layer, [options](DType dtype, LayerUse use) mutable {
            options.dtype = dtype;
            options.max_seq_len = 128;
            const LayerShape shape{.batch = 2, .q_len = 16, .use = use};
            return make_layer(options, shape, Device::cpu()).status();
          }};
}

template <typename Options>
Options plain_options() {
  Options options;
  options.embed_dim = 512;
  options.num_heads = 8;
  return options;
}

std::vector<LayerProbe> layer_probes() {
  auto grouped = plain_options<GroupedQueryOptions>();
  grouped.num_kv_heads = 2;
  auto deepseek = plain_options<LatentOptions>();
  deepseek.form = LatentForm::kDeepSeek;
  deepseek.position = Position::kRope;
  return {probe("MultiHeadAttention", plain_options<MultiHeadOptions>()),
          probe("SelfAttention", plain_options<SelfAttentionOptions>()),
          probe("GroupedQueryAttention", grouped),
          probe("MultiQueryAttention", plain_options<MultiQueryOptions>()),
          probe("LatentAttention, simple", plain_options<LatentOptions>()),
          probe("LatentAttention, DeepSeek", deepseek),
          probe("CCGQAttention, hydra", CcgqaOptions::hydra(512, 8, 2, 4)),
          probe("CCGQAttention, zaya", CcgqaOptions::zaya(512, 8, 2, 64))};
}

std::string answer(const Status& status) {
  return status.ok() ? " yes |" : " no: " + status.message() + " |";
}

}  // namespace

std::string layer_support_table() {
  std::string text = "| layer, on the CPU | f32 | bf16 | f16 | f64 | backward | cache |\n";
  text += "|---|---|---|---|---|---|---|\n";
  for (const LayerProbe& one : layer_probes()) {
    text += std::string("| ") + one.layer + " |";
    for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16, DType::kF64}) {
      text += answer(one.ask(dtype, LayerUse::kInference));
    }
    text += answer(one.ask(DType::kF32, LayerUse::kTraining));
    text += answer(one.ask(DType::kF32, LayerUse::kCached)) + "\n";
  }
  return text;
}

}  // namespace fovea::cli
