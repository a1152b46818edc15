// The error of one output tensor against the oracle, and the bounds it must keep.
#include "harness/error_sum.h"

#include <algorithm>
#include <cmath>

namespace fovea::harness {
namespace {

double ulp_of_one(DType dtype) {
  switch (dtype) {
    case DType::kBf16: return 0x1p-7;
    case DType::kF16: return 0x1p-10;
    case DType::kF32: return 0x1p-23;
    default: return 0x1p-52;
  }
}

}  // namespace

ErrorSum::ErrorSum(std::string tensor, DType dtype, int64_t together)
    : tensor_(std::move(tensor)),
      ulp_(ulp_of_one(dtype)),
      together_(static_cast<double>(std::max<int64_t>(1, together))) {}

void ErrorSum::add(double result, double exact, double plain) {
  ++count_;
  if (!std::isfinite(exact)) {
    // The same infinity, or NaN for NaN: bad input travels where it must.
    wrong_kind_ |= std::isnan(exact) ? !std::isnan(result) : result != exact;
    return;
  }
  if (!std::isfinite(result)) {
    wrong_kind_ = true;
    return;
  }
  magnitude_ = std::max(magnitude_, std::abs(exact));
  const double error = result - exact;
  max_ = std::max(max_, std::abs(error));
  squares_ += error * error;
  signed_ += error;
  add_plain(exact, plain);
}

void ErrorSum::add_plain(double exact, double plain) {
  // Where the plain formula overflowed it is no excuse for another.
  if (!std::isfinite(exact) || !std::isfinite(plain)) return;
  ++plain_count_;
  plain_max_ = std::max(plain_max_, std::abs(plain - exact));
  const double square = (plain - exact) * (plain - exact);
  plain_squares_ += square;
  plain_fourths_ += square * square;
}

// How many independent errors of like size would make up the yardstick's, in a tensor as large as
// the result: all its rows where they err alike, one or two where one row in a hundred sees keys
// compete and the others see one alone.
double ErrorSum::independent_errors() const {
  if (plain_fourths_ == 0) return 1;
  const double alike = plain_squares_ * plain_squares_ / plain_fourths_;
  const double share = static_cast<double>(count_) / static_cast<double>(plain_count_);
  return std::max(1.0, alike * share / together_);
}

Accuracy ErrorSum::result(const Floor& allowed) const {
  const double floor =
      allowed.absolute + allowed.relative * std::max(1.0, magnitude_) + allowed.scaled * magnitude_;
  const auto mean = [](double sum, int64_t n) { return n > 0 ? sum / static_cast<double>(n) : 0; };
  Accuracy a;
  a.tensor = tensor_;
  a.max_err = wrong_kind_ ? std::nan("") : max_;
  a.bound = 2 * plain_max_ + floor + ulp_ * magnitude_;
  a.rms = std::sqrt(mean(squares_, count_));
  // The rms of few errors scatters around what it would be of many: they get more room, up to the
  // bound of the largest.
  const double room = 1.5 * (1 + 8 / std::sqrt(independent_errors()));
  a.rms_bound = std::min(
      a.bound, room * std::sqrt(mean(plain_squares_, plain_count_)) + floor + ulp_ * magnitude_);
  if (allowed.alike) a.rms_bound = a.bound;
  a.mean_err = mean(signed_, count_);
  a.ok = !wrong_kind_ && a.max_err <= a.bound && a.rms <= a.rms_bound;
  return a;
}

}  // namespace fovea::harness
