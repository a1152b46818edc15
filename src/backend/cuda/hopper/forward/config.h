// The shape of one Hopper forward kernel: everything that is fixed when it is compiled.
#pragma once

namespace fovea::cuda::hopper {

inline constexpr int kWarpgroup = 128;        // threads
inline constexpr int kRowsOfWarpgroup = 64;   // of queries: wgmma's
inline constexpr int kRegistersOfSm = 65536;
inline constexpr int kMostSharedBytes = 227 * 1024;

struct ForwardConfig {
  int dim_qk, dim_v;  // padded
  int warpgroups;     // that compute; one more loads
  int tile_kv;
  int stages;            // of K and of V in shared memory
  int unroll;            // blocks of keys a turn of the bare loop
  int giver, taker;      // registers of a thread that loads, that computes

  constexpr int tile_q() const { return kRowsOfWarpgroup * warpgroups; }
  constexpr int threads() const { return kWarpgroup * (warpgroups + 1); }
  // What setmaxnreg may hand out.
  constexpr bool registers_fit() const {
    return kWarpgroup * (giver + warpgroups * taker) <= kRegistersOfSm && giver % 8 == 0 &&
           taker % 8 == 0;
  }
};

// Measured choices are in tiles.h; this is the arithmetic they have to satisfy.
template <typename T, int kDimQk, int kDimV, int kWarpgroups>
struct ForwardShape {
  using Element = T;
  static constexpr ForwardConfig kConfig = {
      kDimQk, kDimV, kWarpgroups,           128,
      2,      kWarpgroups == 2 ? 2 : 1,     kWarpgroups == 2 ? 40 : 32,
      kWarpgroups == 2 ? 232 : 160};
  static_assert(kConfig.registers_fit());
};

}  // namespace fovea::cuda::hopper
