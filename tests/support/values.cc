// Tensors as plain lists.
#include "support/values.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "harness/tensors.h"

namespace fovea::test {
namespace {

template <typename Visit>
void for_each_index(const TensorView& t, const Visit& visit) {
  std::array<int64_t, 4> n{1, 1, 1, 1};
  for (int i = 0; i < t.rank; ++i) n[static_cast<size_t>(i)] = t.sizes[static_cast<size_t>(i)];
  for (int64_t a = 0; a < n[0]; ++a)
    for (int64_t b = 0; b < n[1]; ++b)
      for (int64_t c = 0; c < n[2]; ++c)
        for (int64_t d = 0; d < n[3]; ++d) visit(a, b, c, d);
}

}  // namespace

std::vector<double> values_of(const TensorView& t) {
  std::vector<double> values;
  for_each_index(t, [&](auto... at) { values.push_back(harness::read_element(t, at...)); });
  return values;
}

std::vector<uint64_t> bits_of(const TensorView& t) {
  std::vector<uint64_t> bits;
  const int64_t bytes = dtype_bytes(t.dtype);
  for_each_index(t, [&](int64_t a, int64_t b, int64_t c, int64_t d) {
    const int64_t at = a * t.strides[0] + b * t.strides[1] + c * t.strides[2] + d * t.strides[3];
    uint64_t word = 0;
    std::memcpy(&word, static_cast<const char*>(t.data) + at * bytes, static_cast<size_t>(bytes));
    bits.push_back(word);
  });
  return bits;
}

TensorView slice(const TensorView& t, int dim, int64_t begin, int64_t end) {
  TensorView part = t;
  const auto at = static_cast<size_t>(dim);
  part.sizes[at] = end - begin;
  part.data = static_cast<char*>(t.data) + begin * t.strides[at] * dtype_bytes(t.dtype);
  return part;
}

void copy_values(const TensorView& from, const TensorView& to) {
  for_each_index(from, [&](auto... at) {
    harness::write_element(to, harness::read_element(from, at...), at...);
  });
}

void fill_values(const TensorView& t, double value) {
  for_each_index(t, [&](auto... at) { harness::write_element(t, value, at...); });
}

double relative_difference(const std::vector<double>& a, const std::vector<double>& b,
                           double floor) {
  if (a.size() != b.size()) return std::nan("");
  double most = 0, magnitude = floor;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;  // two equal infinities among them
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) return std::nan("");
    most = std::max(most, std::abs(a[i] - b[i]));
    magnitude = std::max(magnitude, std::abs(b[i]));
  }
  return most / magnitude;
}

double tolerance_of(DType dtype) {
  switch (dtype) {
    case DType::kBf16: return 0x1p-6;
    case DType::kF16: return 0x1p-9;
    case DType::kF32: return 2e-5;
    default: return 1e-10;
  }
}

}  // namespace fovea::test
