// Softcap of scores that are far below its bound, without special functions: an SM has too few of
// them for a second one a score.
#pragma once

#include <numbers>

namespace fovea::cuda::hopper {

// What softcap makes of a product x of a query and a key, in log2 units, as long as the score is
// below a quarter of the bound: (first + third * lack) * x, to 7.8e-6 of the bound. `lack` is the
// square of x less that of the limit: its sign tells that x is below.
struct CapSeries {
  float minus_square;  // of the limit
  float first, third;

  static constexpr double kMostBound = 64;  // of larger ones the error would be past 5e-4

  static CapSeries of(double scale, double bound) {
    constexpr double kLimit = 0.25, kFirst = 0.99984343, kThird = -0.32319896;
    const double unit = scale / bound, to_log2 = scale * std::numbers::log2e;
    return {static_cast<float>(-kLimit * kLimit / (unit * unit)),
            static_cast<float>(to_log2 * (kFirst + kThird * kLimit * kLimit)),
            static_cast<float>(to_log2 * unit * unit * kThird)};
  }
};

}  // namespace fovea::cuda::hopper
