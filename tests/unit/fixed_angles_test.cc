// RoPE's angles in fixed point: as exact far away as near.
#include "layers/cuda/fixed_angles.h"

#include <gtest/gtest.h>

#include <cmath>

namespace fovea::layers::cuda {
namespace {

constexpr long double kTurn = 6.283185307179586476925286766559005768L;

// The part of a turn that is left over, in -1/2..1/2.
long double fraction(long double turns) { return turns - std::round(turns); }

TEST(FixedAngles, WrapAroundExactly) {
  for (const double base : {10000.0, 500.0, 1e6, 0.25}) {
    for (const int64_t turning : {2, 20, 64, 256}) {
      const FixedAngles angles =
          FixedAngles::make({.base = base, .style = RopeStyle::kHalf}, turning);
      ASSERT_EQ(angles.turning, turning);
      for (const int64_t position : {0, 1, 2, 77, 4095, 1000003, 2147483647, -5}) {
        for (int pair = 0; pair < turning / 2; ++pair) {
          const uint64_t phase = angles.step[pair] * static_cast<uint64_t>(position);
          const auto turns = static_cast<long double>(static_cast<int64_t>(phase)) * 0x1p-64L;
          const long double expected = static_cast<long double>(position) *
                                       std::pow(static_cast<long double>(base),
                                                -2.0L * pair / static_cast<long double>(turning)) /
                                       kTurn;
          EXPECT_LT(std::abs(fraction(turns - expected)), 1e-9L)
              << "base " << base << ", pair " << pair << ", position " << position;
        }
      }
    }
  }
}

}  // namespace
}  // namespace fovea::layers::cuda
