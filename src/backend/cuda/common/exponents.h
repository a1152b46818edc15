// Scores that need no scale before the exponential.
#pragma once

#include <cmath>
#include <numbers>

namespace fovea::cuda {

// Whether products q . k are exponents of 2 as they are, for the scale is ln 2.
inline bool products_are_exponents(double scale) {
  constexpr double kSame = 1e-6;  // relative: less than the rounding of scores
  return std::abs(scale * std::numbers::log2e - 1) < kSame;
}

}  // namespace fovea::cuda
