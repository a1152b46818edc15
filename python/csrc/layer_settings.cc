#include "layer_settings.h"

#include <cstdlib>
#include <sstream>
#include <stdexcept>

namespace fovea::torch_ops {
namespace {

[[noreturn]] void refuse(const std::string& name, const std::string& value, const char* must_be) {
  throw std::runtime_error("fovea: layer: " + name + " is " + value + ", must be " + must_be);
}

void read_dtype(Settings& s, DType& to) {
  s.read("dtype", to, {"f32", "f16", "bf16", "f64"});  // in the order of DType
}

// What torch is asked about at each call.
template <typename Options>
void read_process_settings(Settings& s, Options& o) {
  s.read("tf32", o.tf32, {"0", "1"});
  s.read("deterministic", o.determinism, {"0", "1"});
}

void read_rope(Settings& s, RopeOptions& o) {
  s.read("rope_base", o.base);
  s.read("rope_style", o.style, {"half", "interleaved"});
  s.read("rope_fraction", o.fraction);
}

void read_common(Settings& s, LayerOptions& o) {
  s.read("embed_dim", o.embed_dim);
  s.read("num_heads", o.num_heads);
  s.read("head_dim", o.head_dim);
  read_dtype(s, o.dtype);
  s.read("causal", o.causal);
  s.read("sliding_window", o.sliding_window);
  s.read("dropout", o.dropout);
  s.read("position", o.position, {"none", "rope", "alibi"});
  read_rope(s, o.rope);
  s.read("qk_norm", o.qk_norm, {"none", "rmsnorm", "layernorm"});
  s.read("norm_eps", o.norm_eps);
  s.read("softmax_scale", o.softmax_scale);
  s.read("max_seq_len", o.max_seq_len);
  read_process_settings(s, o);
}

MultiHeadOptions read_multi_head(Settings& s) {
  MultiHeadOptions o;
  read_common(s, o);
  s.read("kdim", o.kdim);
  s.read("vdim", o.vdim);
  s.read("bias", o.bias);
  return o;
}

GroupedQueryOptions read_grouped_query(Settings& s) {
  GroupedQueryOptions o;
  read_common(s, o);
  s.read("num_kv_heads", o.num_kv_heads);
  s.read("bias", o.bias);
  return o;
}

LatentOptions read_latent(Settings& s) {
  LatentOptions o;
  read_common(s, o);
  s.read("form", o.form, {"simple", "deepseek"});
  s.read("q_latent", o.q_latent);
  s.read("kv_latent", o.kv_latent);
  s.read("nope_dim", o.nope_dim);
  s.read("rope_dim", o.rope_dim);
  s.read("v_dim", o.v_dim);
  s.read("decode", o.decode, {"auto", "expanded", "absorbed"});
  return o;
}

CcgqaOptions read_ccgqa(Settings& s) {
  CcgqaOptions o;
  s.read("embed_dim", o.embed_dim);
  s.read("num_heads", o.num_heads);
  s.read("num_kv_heads", o.num_kv_heads);
  s.read("head_dim", o.head_dim);
  read_dtype(s, o.dtype);
  s.read("convs", o.convs);
  s.read("conv", o.conv, {"heads_then_all", "channels_then_heads"});
  s.read("conv_taps_1", o.conv_taps[0]);
  s.read("conv_taps_2", o.conv_taps[1]);
  s.read("conv_bias", o.conv_bias);
  s.read("qk_mean", o.qk_mean);
  s.read("coupling", o.coupling, {"all_heads", "group"});
  s.read("qk_norm", o.qk_norm);
  s.read("sqrt_dim_norm", o.sqrt_dim_norm);
  s.read("temperature", o.temperature, {"shared", "per_head", "per_head_exp"});
  s.read("rope", o.rope);
  read_rope(s, o.rotary);
  s.read("value_shift", o.value_shift);
  s.read("causal", o.causal);
  s.read("sliding_window", o.sliding_window);
  s.read("softmax_scale", o.softmax_scale);
  s.read("output_scale", o.output_scale);
  s.read("max_seq_len", o.max_seq_len);
  read_process_settings(s, o);
  return o;
}

}  // namespace

Settings::Settings(const std::string& line) {
  std::istringstream words(line);
  words >> kind_;
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos) refuse("a setting", word, "name=value");
    values_[word.substr(0, equals)] = word.substr(equals + 1);
  }
}

std::optional<std::string> Settings::take(const char* name) {
  auto found = values_.extract(name);
  if (found.empty()) return std::nullopt;
  return std::move(found.mapped());
}

void Settings::read(const char* name, int64_t& to) {
  const auto text = take(name);
  if (!text) return;
  char* end = nullptr;
  to = std::strtoll(text->c_str(), &end, 10);
  if (text->empty() || *end != '\0') refuse(name, *text, "a whole number");
}

void Settings::read(const char* name, bool& to) { read(name, to, {"0", "1"}); }

void Settings::read(const char* name, double& to) {
  std::optional<double> given;
  read(name, given);
  if (given) to = *given;
}

void Settings::read(const char* name, std::optional<double>& to) {
  const auto text = take(name);
  if (!text) return;
  char* end = nullptr;
  to = std::strtod(text->c_str(), &end);
  if (text->empty() || *end != '\0') refuse(name, *text, "a number");
}

void Settings::read(const char* name, std::string& to) {
  if (auto text = take(name)) to = *std::move(text);
}

std::optional<int> Settings::read_word(const char* name, std::initializer_list<const char*> words) {
  const auto text = take(name);
  if (!text) return std::nullopt;
  std::string all;
  int at = 0;
  for (const char* word : words) {
    if (*text == word) return at;
    all += (at++ == 0 ? "" : " or ") + std::string(word);
  }
  refuse(name, *text, all.c_str());
}

void Settings::refuse_unread() const {
  if (!values_.empty()) refuse("a setting", values_.begin()->first, "one that the layer has");
}

LayerSettings parse_layer(const std::string& line) {
  Settings s(line);
  LayerSettings layer;
  if (s.kind() == "multi_head") {
    layer.options = read_multi_head(s);
  } else if (s.kind() == "grouped_query") {
    layer.options = read_grouped_query(s);
  } else if (s.kind() == "latent") {
    layer.options = read_latent(s);
  } else if (s.kind() == "ccgqa") {
    layer.options = read_ccgqa(s);
  } else {
    refuse("kind", s.kind(), "multi_head, grouped_query, latent or ccgqa");
  }
  s.read("backend", layer.backend);
  s.refuse_unread();
  return layer;
}

}  // namespace fovea::torch_ops
