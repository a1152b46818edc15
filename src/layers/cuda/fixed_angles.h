// RoPE's angles as a GPU computes them: in fixed point, where a full turn is 2^64. A position times
// a pair's step wraps around by itself, exactly, however far the position is; no table is needed.
#pragma once

#include <cmath>
#include <cstdint>

#include "fovea/layers.h"

namespace fovea::layers::cuda {

struct FixedAngles {
  static constexpr int kMostPairs = 128;  // the operator's heads have 256 channels at most

  int turning = 0;  // channels of a head, the first ones
  RopeStyle style = RopeStyle::kHalf;
  uint64_t step[kMostPairs] = {};  // what pair i turns by from one position to the next

  static FixedAngles make(const RopeOptions& rope, int64_t turning) {
    constexpr long double kTurn = 6.283185307179586476925286766559005768L;
    FixedAngles r;
    r.turning = static_cast<int>(turning);
    r.style = rope.style;
    for (int i = 0; i < r.turning / 2; ++i) {
      const long double turns =
          std::pow(static_cast<long double>(rope.base), -2.0L * i / r.turning) / kTurn;
      // Whole turns are none.
      r.step[i] = static_cast<uint64_t>(std::ldexp(turns - std::floor(turns), 64));
    }
    return r;
  }
};

}  // namespace fovea::layers::cuda
