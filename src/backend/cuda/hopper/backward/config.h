// The shape of the Hopper backward kernel of small heads: everything that is fixed when it is
// compiled.
#pragma once

#include "backend/cuda/hopper/forward/config.h"

namespace fovea::cuda::hopper {

struct BackwardConfig {
  int dim;         // of q, k and v alike
  int warpgroups;  // that compute; one more loads
  int key_tiles;   // of 64 keys, that a warpgroup holds
  int stages;      // of query rows in shared memory

  static constexpr int kSumRows = 16;  // that dq is added to memory by

  constexpr int group_keys() const { return 64 * key_tiles; }
  constexpr int keys() const { return warpgroups * group_keys(); }
  // Of a stage: so many that dQ of a stage is one product of every warpgroup.
  constexpr int rows() const { return 64 * warpgroups; }
  constexpr int computing_threads() const { return kWarpgroup * warpgroups; }
  constexpr int threads() const { return computing_threads() + kWarpgroup; }
};

// Registers of a thread, after the warpgroup that loads has given its own away.
inline constexpr int kLoaderRegisters = 24, kComputerRegisters = 240;

// Threads of that warpgroup that load. Where products are exponents but for lse there is more for
// them to work out; elsewhere a warp is in time, and more of them are in the others' way.
constexpr int loaders(bool exponents) { return exponents ? kWarpgroup : 32; }

template <typename T, int kDim, int kWarpgroups, int kKeyTiles, int kStages>
struct BackwardShape {
  using Element = T;
  static constexpr BackwardConfig kConfig = {kDim, kWarpgroups, kKeyTiles, kStages};
};

}  // namespace fovea::cuda::hopper
