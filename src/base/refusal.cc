// Text of refusals; see the header for the grammar.
#include "base/refusal.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>

namespace fovea {

std::string show(int64_t value) { return std::to_string(value); }

std::string show(double value) {
  std::array<char, 32> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value).ptr;
  return std::string(text.data(), end);
}

std::string show(DType value) {
  const std::string name = dtype_name(value);
  return name == "unknown" ? "dtype " + show(static_cast<int64_t>(value)) : name;
}

std::string show(Device value) {
  const std::string index = show(static_cast<int64_t>(value.index));
  switch (value.type) {
    case DeviceType::kCpu: return "cpu";
    case DeviceType::kCuda: return "cuda:" + index;
  }
  return "device type " + show(static_cast<int64_t>(value.type));
}

std::string show(const void* pointer) {
  if (pointer == nullptr) return "null";
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%p", pointer);
  return text.data();
}

Rule must(std::string_view what) { return Rule(", must " + std::string(what)); }
Rule but(std::string_view what) { return Rule(" but " + std::string(what)); }
Rule must_equal(std::string_view name, int64_t value) {
  return must("equal " + std::string(name) + " = " + show(value));
}
Rule must_be_in(int64_t first, int64_t last) {
  return must("be in " + show(first) + ".." + show(last));
}
Rule must_be_at_least(int64_t least) { return must("be at least " + show(least)); }
Rule must_be_given() { return must("be given"); }

Status refuse(std::string_view call, std::string_view argument, std::string_view value,
              const Rule& rule) {
  std::string message;
  message.append(call).append(": ").append(argument).append(" is ").append(value);
  message.append(rule.text());
  return {StatusCode::kInvalidArgument, std::move(message)};
}

std::string refusal_lines(const std::vector<EngineRefusal>& refusals) {
  size_t width = 0;
  for (const EngineRefusal& refusal : refusals) width = std::max(width, refusal.engine.size());
  std::string lines;
  for (const EngineRefusal& refusal : refusals) {
    std::string name = refusal.engine;
    name.resize(width, ' ');
    for (const std::string& reason : refusal.reasons) {
      lines.append("\n  ").append(name).append("  ").append(reason);
      name.assign(width, ' ');  // the name once, further reasons under the first
    }
  }
  return lines;
}

Status unsupported(std::string_view call, std::string_view what,
                   const std::vector<EngineRefusal>& refusals, std::string_view hint) {
  std::string message;
  message.append(call).append(": ").append(what).append(refusal_lines(refusals));
  if (!hint.empty()) message.append("\n  hint: ").append(hint);
  return {StatusCode::kUnsupported, std::move(message)};
}

}  // namespace fovea
