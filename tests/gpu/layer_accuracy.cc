// The 2x rule of layers.
#include "layer_accuracy.h"

namespace fovea::test {
namespace {

struct Errors {
  double largest = 0, rms = 0;
};

Errors errors_of(const TensorView& got, const TensorView& want) {
  Errors e{largest_difference(got, want), 0};
  for (int64_t i = 0; i < want.elements(); ++i) {
    const double d = element(got, i) - element(want, i);
    e.rms += d * d;
  }
  e.rms = std::sqrt(e.rms / static_cast<double>(std::max<int64_t>(1, want.elements())));
  return e;
}

constexpr int64_t kFew = 8;  // elements of a temperature

double ulp_of(DType dtype) {
  return dtype == DType::kBf16 ? 0x1p-7 : dtype == DType::kF16 ? 0x1p-10 : 0x1p-23;
}

}  // namespace

void convert(const TensorView& from, const TensorView& to) {
  for (int64_t i = 0; i < from.elements(); ++i) set_element(to, i, element(from, i));
}

void expect_within_twice(const std::vector<NamedTensor>& got, const std::vector<NamedTensor>& plain,
                         const std::vector<NamedTensor>& want) {
  ASSERT_EQ(got.size(), want.size());
  double scale = 0;  // of the gradients of weights
  for (size_t n = 2; n < want.size(); ++n) scale = std::max(scale, largest(want[n].view));
  for (size_t n = 0; n < want.size(); ++n) {
    const Errors e = errors_of(got[n].view, want[n].view);
    const Errors twice = errors_of(plain[n].view, want[n].view);
    // A sum over everything, whose terms cancel; and one error says little of another.
    const bool is_sum = want[n].view.elements() <= kFew;
    const double least = n < 2 ? 0 : is_sum ? scale : 0.05 * scale;
    const double ulp = ulp_of(got[n].view.dtype) * std::max(largest(want[n].view), least);
    // In f32 the CPU adds block by block, which errs less than one sum after the other does.
    const double ulps = got[n].view.dtype == DType::kF32 ? 4 : 1;
    EXPECT_LE(e.largest, 2 * twice.largest + ulps * ulp) << want[n].name;
    if (is_sum) continue;
    EXPECT_LE(e.rms, 1.5 * twice.rms + 0.25 * ulp) << want[n].name;
  }
}

}  // namespace fovea::test
