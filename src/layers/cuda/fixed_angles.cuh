// cos and sin of a pair of channels at a position.
#pragma once

#include "layers/cuda/fixed_angles.h"

namespace fovea::layers::cuda {

struct Angle {
  float cosine, sine;
};

__device__ __forceinline__ Angle angle_at(uint64_t step, int64_t position) {
  const auto phase = static_cast<int64_t>(step * static_cast<uint64_t>(position));
  const float half_turns = static_cast<float>(static_cast<int>(phase >> 32)) * 0x1p-31f;
  Angle angle;
  sincospif(half_turns, &angle.sine, &angle.cosine);
  return angle;
}

}  // namespace fovea::layers::cuda
