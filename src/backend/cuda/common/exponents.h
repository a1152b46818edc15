// Scores that need no scale before the exponential, and those that need no maximum.
#pragma once

#include <cmath>
#include <numbers>

namespace fovea::cuda {

// Whether products q . k are exponents of 2 as they are, for the scale is ln 2.
inline bool products_are_exponents(double scale) {
  constexpr double kSame = 1e-6;  // relative: less than the rounding of scores
  return std::abs(scale * std::numbers::log2e - 1) < kSame;
}

// Logits up to which weights may refer to 0: far from where sums leave the range of floats.
inline constexpr double kMostLogitBound = 44;

}  // namespace fovea::cuda
