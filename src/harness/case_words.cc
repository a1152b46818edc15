// Words and plain values.
#include "harness/case_words.h"

#include <sstream>

namespace fovea::harness {

std::vector<Item> split_words(const std::string& text) {
  std::vector<Item> items;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    Item item{word.substr(0, equals), "", equals == std::string::npos};
    if (!item.bare) item.value = word.substr(equals + 1);
    items.push_back(std::move(item));
  }
  return items;
}

Status wrong(const Item& item, const std::string& takes) {
  return {StatusCode::kInvalidArgument, "parse_case: " + item.key + " is " +
                                            (item.value.empty() ? "empty" : item.value) +
                                            ", must be " + takes};
}

Status unknown_key(const Item& item) {
  return {StatusCode::kInvalidArgument, "parse_case: " + item.key + " is not a key of a case"};
}

Status read_size(const Item& item, int64_t& out) {
  if (!read_number(item.value, out) || out < 0) return wrong(item, "an integer of 0 or more");
  return {};
}

Status read_seed(const Item& item, uint64_t& out) {
  return read_number(item.value, out) ? Status() : wrong(item, "an integer of 0 or more");
}

}  // namespace fovea::harness
