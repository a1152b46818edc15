// The words of a case's text, key=value or a key alone, and how their values are read.
#pragma once

#include <array>
#include <charconv>
#include <string>
#include <vector>

#include "fovea/status.h"
#include "harness/case_names.h"

namespace fovea::harness {

// One key=value of the text; a bare key has no value.
struct Item {
  std::string key;
  std::string value;
  bool bare = false;
};

std::vector<Item> split_words(const std::string& text);

// "parse_case: KEY is VALUE, must be `takes`".
Status wrong(const Item& item, const std::string& takes);
Status unknown_key(const Item& item);

template <typename T>
bool read_number(const std::string& text, T& out) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, out);
  return error == std::errc() && stop == end;
}

Status read_size(const Item& item, int64_t& out);
Status read_seed(const Item& item, uint64_t& out);

template <typename E, size_t N>
Status read_name(const Item& item, const std::array<Named<E>, N>& names, E& out) {
  std::string takes;
  for (const Named<E>& n : names) {
    if (item.value == n.name) {
      out = n.value;
      return {};
    }
    takes += (takes.empty() ? "" : ", ") + std::string(n.name);
  }
  return wrong(item, "one of " + takes);
}

}  // namespace fovea::harness
