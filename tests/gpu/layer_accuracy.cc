// The 2x rule of layers.
#include "layer_accuracy.h"

#include <algorithm>

namespace fovea::test {
namespace {

constexpr size_t kFew = 8;  // elements of a temperature

double ulp_of(DType dtype) {
  return dtype == DType::kBf16 ? 0x1p-7 : dtype == DType::kF16 ? 0x1p-10 : 0x1p-23;
}

double largest(const std::vector<double>& values) {
  double most = 0;
  for (const double x : values) most = std::max(most, std::abs(x));
  return most;
}

std::vector<double> all_values_of(const TensorView& t) {
  std::vector<double> values(static_cast<size_t>(t.elements()));
  for (size_t i = 0; i < values.size(); ++i) values[i] = element(t, static_cast<int64_t>(i));
  return values;
}

}  // namespace

void convert(const TensorView& from, const TensorView& to) {
  for (int64_t i = 0; i < from.elements(); ++i) set_element(to, i, element(from, i));
}

LayerYardstick::Errors LayerYardstick::errors_of(const TensorView& got,
                                                 const std::vector<double>& exact) {
  Errors e;
  for (size_t i = 0; i < exact.size(); ++i) {
    const double d = std::abs(element(got, static_cast<int64_t>(i)) - exact[i]);
    if (!(d <= e.largest) && !std::isnan(e.largest)) e.largest = d;  // NaN stays
    e.rms += d * d;
  }
  e.rms = std::sqrt(e.rms / std::max(1.0, static_cast<double>(exact.size())));
  return e;
}

void LayerYardstick::set(const std::vector<NamedTensor>& plain,
                         const std::vector<NamedTensor>& exact) {
  ASSERT_EQ(plain.size(), exact.size());
  for (size_t n = 0; n < exact.size(); ++n) {
    Result& result = results_.emplace_back();
    result.name = exact[n].name;
    result.exact = all_values_of(exact[n].view);
    result.plain = errors_of(plain[n].view, result.exact);
  }
}

bool LayerYardstick::wants_more_draws() const {
  return std::any_of(results_.begin(), results_.end(),
                     [](const Result& result) { return result.exact.size() <= kFew; });
}

void LayerYardstick::add_draw(const std::vector<NamedTensor>& plain,
                              const std::vector<NamedTensor>& exact) {
  for (size_t n = 0; n < results_.size(); ++n) {
    Result& result = results_[n];
    if (result.exact.size() > kFew) continue;
    const Errors another = errors_of(plain[n].view, all_values_of(exact[n].view));
    result.plain.largest = std::max(result.plain.largest, another.largest);
    result.plain.rms = std::max(result.plain.rms, another.rms);
  }
}

void LayerYardstick::expect_within_twice(const std::vector<NamedTensor>& got) const {
  ASSERT_LE(got.size(), results_.size());
  for (size_t n = 0; n < got.size(); ++n) {
    const auto& [name, exact, plain] = results_[n];
    ASSERT_EQ(got[n].name, name);
    ASSERT_EQ(static_cast<size_t>(got[n].view.elements()), exact.size()) << name;
    const Errors e = errors_of(got[n].view, exact);
    const double ulp = ulp_of(got[n].view.dtype) * largest(exact);
    EXPECT_LE(e.largest, 2 * plain.largest + ulp) << name;
    // The rms of few errors scatters: docs/numerics.md.
    const double room = 1 + 8 / std::sqrt(std::max(1.0, static_cast<double>(exact.size())));
    EXPECT_LE(e.rms, 1.5 * room * plain.rms + 0.25 * ulp) << name;
  }
}

}  // namespace fovea::test
