// The text of a layer's case.
#include "harness/layer_case.h"

#include <algorithm>

#include "harness/case_words.h"

namespace fovea::harness {
namespace {

constexpr std::array<Named<LayerKind>, 6> kLayerNames{{{"mha", LayerKind::kMultiHead},
                                                       {"self", LayerKind::kSelf},
                                                       {"gqa", LayerKind::kGrouped},
                                                       {"mqa", LayerKind::kMultiQuery},
                                                       {"latent", LayerKind::kLatent},
                                                       {"ccgqa", LayerKind::kCcgqa}}};
constexpr std::array<Named<CcgqaPreset>, 2> kPresetNames{
    {{"hydra", CcgqaPreset::kHydra}, {"zaya", CcgqaPreset::kZaya}}};
constexpr std::array<Named<Position>, 2> kPositionNames{
    {{"rope", Position::kRope}, {"none", Position::kNone}}};

constexpr int64_t kCompression = 4;  // of ccgqa, where d is not given

Status read_pass(const Item& item, LayerCase& c) {
  c.forward = item.value == "fwd" || item.value == "fwd,fwd+bwd";
  c.training = item.value == "fwd+bwd" || item.value == "fwd,fwd+bwd";
  if (!c.forward && !c.training) return wrong(item, "fwd, fwd+bwd or fwd,fwd+bwd");
  return {};
}

Status read_item(const Item& item, LayerCase& c) {
  const std::string& key = item.key;
  if (key == "layer") return read_name(item, kLayerNames, c.kind);
  if (key == "preset") return read_name(item, kPresetNames, c.preset);
  if (key == "b") return read_size(item, c.batch);
  if (key == "hq") return read_size(item, c.head_q);
  if (key == "hkv") return read_size(item, c.head_kv);
  if (key == "q") return read_size(item, c.q_len);
  if (key == "d") return read_size(item, c.head_dim);
  if (key == "e") return read_size(item, c.embed_dim);
  if (key == "dtype") return read_name(item, kDTypeNames, c.dtype);
  if (key == "position") return read_name(item, kPositionNames, c.position);
  if (key == "pass") return read_pass(item, c);
  if (key == "seed") return read_seed(item, c.seed);
  return unknown_key(item);
}

Status refusal(const std::string& what) {
  return {StatusCode::kInvalidArgument, "parse_case: " + what};
}

// The number of KV heads that a kind of layer has, where that is not the case's own choice.
int64_t heads_kv_of(const LayerCase& c) {
  if (c.kind == LayerKind::kMultiQuery) return 1;
  const bool chosen = c.kind == LayerKind::kGrouped || c.kind == LayerKind::kCcgqa;
  return chosen && c.head_kv != 0 ? c.head_kv : c.head_q;
}

}  // namespace

Result<LayerCase> parse_layer_case(const std::string& text) {
  LayerCase c;
  for (const Item& item : split_words(text)) {
    if (Status s = read_item(item, c); !s.ok()) return s;
  }
  if (c.q_len == 0) return refusal("q is missing");
  if (c.embed_dim == 0) return refusal("e is missing");
  if (c.head_q == 0) return refusal("hq is 0, must be at least 1");
  const int64_t heads_kv = heads_kv_of(c);
  if (c.head_kv != 0 && c.head_kv != heads_kv) {
    return refusal("hkv is " + std::to_string(c.head_kv) + ", must be " + std::to_string(heads_kv) +
                   " for layer=" + layer_name(c));
  }
  c.head_kv = heads_kv;
  const int64_t parts = c.head_q * (c.kind == LayerKind::kCcgqa ? kCompression : 1);
  if (c.head_dim == 0 && c.embed_dim % parts != 0) {
    return refusal("e is " + std::to_string(c.embed_dim) + ", must be a multiple of " +
                   std::to_string(parts) + " where d is not given");
  }
  if (c.head_dim == 0) c.head_dim = c.embed_dim / parts;
  return c;
}

std::string format_case(const LayerCase& c) {
  std::string text = std::string("layer=") + layer_name(c);
  const auto put = [&](const char* key, const std::string& value) {
    text += std::string(" ") + key + "=" + value;
  };
  if (c.preset != CcgqaPreset::kHydra) put("preset", name_of(kPresetNames, c.preset));
  put("e", std::to_string(c.embed_dim));
  put("b", std::to_string(c.batch));
  put("hq", std::to_string(c.head_q));
  put("hkv", std::to_string(c.head_kv));
  put("q", std::to_string(c.q_len));
  put("d", std::to_string(c.head_dim));
  put("dtype", name_of(kDTypeNames, c.dtype));
  if (c.position != Position::kRope) put("position", name_of(kPositionNames, c.position));
  put("pass", c.forward ? (c.training ? "fwd,fwd+bwd" : "fwd") : "fwd+bwd");
  if (c.seed != 1) put("seed", std::to_string(c.seed));
  return text;
}

const char* layer_name(const LayerCase& c) { return name_of(kLayerNames, c.kind); }

Result<AnyCase> parse_any_case(const std::string& text) {
  const std::vector<Item> items = split_words(text);
  const bool layer =
      std::any_of(items.begin(), items.end(), [](const Item& item) { return item.key == "layer"; });
  if (layer) {
    Result<LayerCase> c = parse_layer_case(text);
    if (!c.ok()) return c.status();
    return AnyCase(*c);
  }
  Result<Case> c = parse_case(text);
  if (!c.ok()) return c.status();
  return AnyCase(std::move(*c));
}

std::string format_case(const AnyCase& c) {
  return std::visit([](const auto& one) { return format_case(one); }, c);
}

}  // namespace fovea::harness
