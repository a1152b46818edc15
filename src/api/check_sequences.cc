// Values of key_lengths and cu_seqlens, read once per call.
#include "api/check_sequences.h"

#include <string>

#include "base/refusal.h"

namespace fovea {
namespace {

std::string element(const char* argument, int64_t index) {
  return std::string(argument) + "[" + std::to_string(index) + "]";
}

}  // namespace

Status check_key_lengths(const char* call, const TensorView& lengths, int64_t kv_len) {
  const auto* values = static_cast<const int32_t*>(lengths.data);
  const int64_t stride = lengths.sizes[0] > 1 ? lengths.strides[0] : 0;
  for (int64_t b = 0; b < lengths.sizes[0]; ++b) {
    const int64_t value = values[b * stride];
    if (value >= 0 && value <= kv_len) continue;
    return refuse(call, element("key_lengths", b), show(value), must_be_in(0, kv_len));
  }
  return {};
}

Status check_cu_seqlens(const CuSeqlensRule& rule, const TensorView& bounds) {
  const auto* values = static_cast<const int32_t*>(bounds.data);
  if (values[0] != 0) {
    return refuse(rule.call, element(rule.argument, 0), show(int64_t{values[0]}), must("be 0"));
  }
  const int64_t last = bounds.sizes[0] - 1;
  for (int64_t b = 0; b < last; ++b) {
    const int64_t begin = values[b], end = values[b + 1];
    if (end < begin) {
      return refuse(rule.call, element(rule.argument, b + 1), show(end),
                    must("be at least " + element(rule.argument, b) + " = " + show(begin)));
    }
    if (end - begin > rule.longest) {
      return refuse(
          rule.call, element(rule.argument, b + 1), show(end),
          must("be at most " + std::string(rule.longest_name) + " = " + show(rule.longest) +
               " above " + element(rule.argument, b) + " = " + show(begin)));
    }
  }
  if (values[last] != rule.total) {
    return refuse(rule.call, element(rule.argument, last), show(int64_t{values[last]}),
                  must_equal("problem." + std::string(rule.total_name), rule.total));
  }
  return {};
}

}  // namespace fovea
