// RoPE's angles as a GPU computes them: in fixed point, where a full turn is 2^64. A position times
// a pair's step wraps around by itself, exactly, however far the position is; no table is needed.
#pragma once

#include <cmath>
#include <cstdint>

#include "fovea/layers.h"

namespace fovea::layers::cuda {

// An angle in radians; whole turns are none.
inline uint64_t fixed_angle(long double radians) {
  constexpr long double kTurn = 6.283185307179586476925286766559005768L;
  const long double turns = radians / kTurn;
  return static_cast<uint64_t>(std::ldexp(turns - std::floor(turns), 64));
}

struct FixedAngles {
  static constexpr int kMostPairs = 128;  // the operator's heads have 256 channels at most

  int turning = 0;  // channels of a head, the first ones
  RopeStyle style = RopeStyle::kHalf;
  uint64_t step[kMostPairs] = {};  // what pair i turns by from one position to the next

  static FixedAngles make(const RopeOptions& rope, int64_t turning) {
    FixedAngles r;
    r.turning = static_cast<int>(turning);
    r.style = rope.style;
    for (int i = 0; i < r.turning / 2; ++i) {
      r.step[i] = fixed_angle(std::pow(static_cast<long double>(rope.base), -2.0L * i / r.turning));
    }
    return r;
  }
};

}  // namespace fovea::layers::cuda
