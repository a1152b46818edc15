// A layer's options as one line of text, the way they reach an op: a kind, then names and values.
//
//   grouped_query embed_dim=512 num_heads=8 num_kv_heads=2 causal=1 position=rope dtype=bf16
//
// What is not named keeps the default of fovea/layers.h.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <variant>

#include "fovea/layers.h"

namespace fovea::torch_ops {

// The settings of one line by name. Each is read at most once; what nobody read is refused.
class Settings {
 public:
  explicit Settings(const std::string& line);
  const std::string& kind() const { return kind_; }

  void read(const char* name, int64_t& to);
  void read(const char* name, bool& to);
  void read(const char* name, double& to);
  void read(const char* name, std::optional<double>& to);
  void read(const char* name, std::string& to);
  // The place of the value among the words is the enumerator.
  template <typename Enum>
  void read(const char* name, Enum& to, std::initializer_list<const char*> words) {
    if (const std::optional<int> at = read_word(name, words)) to = static_cast<Enum>(*at);
  }
  void refuse_unread() const;

 private:
  std::optional<std::string> take(const char* name);
  std::optional<int> read_word(const char* name, std::initializer_list<const char*> words);

  std::string kind_;
  std::map<std::string, std::string> values_;
};

struct LayerSettings {
  std::variant<MultiHeadOptions, GroupedQueryOptions, LatentOptions, CcgqaOptions> options;
  std::string backend;  // as in PlanOptions
};

// Throws where the line is none.
LayerSettings parse_layer(const std::string& line);

}  // namespace fovea::torch_ops
