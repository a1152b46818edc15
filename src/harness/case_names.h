// The words that a case's text uses for enumerated values, for reading and for writing.
#pragma once

#include <array>

#include "harness/case.h"

namespace fovea::harness {

template <typename E>
struct Named {
  const char* name;
  E value;
};

inline constexpr std::array<Named<DType>, 4> kDTypeNames{
    {{"f32", DType::kF32}, {"f16", DType::kF16}, {"bf16", DType::kBf16}, {"f64", DType::kF64}}};

inline constexpr std::array<Named<TensorOrder>, 2> kOrderNames{
    {{"bshd", TensorOrder::kBshd}, {"bhsd", TensorOrder::kBhsd}}};

inline constexpr std::array<Named<DataFamily>, 6> kDataNames{
    {{"normal", DataFamily::kNormal},
     {"spiky", DataFamily::kSpiky},
     {"large_logits", DataFamily::kLargeLogits},
     {"constant", DataFamily::kConstant},
     {"tiny", DataFamily::kTiny},
     {"outlier_channels", DataFamily::kOutlierChannels}}};

template <typename E, size_t N>
constexpr const char* name_of(const std::array<Named<E>, N>& names, E value) {
  for (const Named<E>& n : names) {
    if (n.value == value) return n.name;
  }
  return "?";
}

}  // namespace fovea::harness
