// The shape of one Hopper forward kernel: everything that is fixed when it is compiled.
#pragma once

namespace fovea::cuda::hopper {

inline constexpr int kWarpgroup = 128;       // threads
inline constexpr int kRowsOfWarpgroup = 64;  // of queries: wgmma's
inline constexpr int kRegistersOfSm = 65536;
inline constexpr int kMostSharedBytes = 227 * 1024;
inline constexpr int kOwnSharedBytes = 512;  // barriers and the like, at most

struct ForwardConfig {
  int dim_qk, dim_v;  // padded
  int warpgroups;     // that compute; one more loads, unless resident
  int tile_kv;
  int stages;     // of K and of V in shared memory
  int unroll;     // blocks of keys a turn of the bare loop
  bool capped;    // scores go through softcap
  bool resident;  // a block has one tile, all of whose keys its stages hold (resident.cuh)

  constexpr int tile_q() const { return kRowsOfWarpgroup * warpgroups; }

  // Where tiles hold more rows than there are, whole warpgroups without any are those of a
  // sequence's first tile, which under a causal mask sees the fewest keys: the row that it begins
  // at is negative. Longer blocks of keys would then lie askew to the diagonal.
  constexpr bool fills_from_end() const { return tile_kv == kRowsOfWarpgroup; }

  // Shared memory, in panels of 64 columns: Q of two tiles where there is room, so that the next
  // one is there when a tile ends; outputs in several passes where there is little.
  static constexpr int panels(int dim) { return (dim + 63) / 64; }
  constexpr int shared_bytes(int q_tiles, int out_panels) const {
    return (q_tiles * tile_q() * panels(dim_qk) + tile_q() * out_panels +
            stages * tile_kv * (panels(dim_qk) + panels(dim_v))) *
               128 +
           kOwnSharedBytes;
  }
  constexpr int q_stages() const {
    return shared_bytes(2, panels(dim_v)) <= kMostSharedBytes ? 2 : 1;
  }
  constexpr int out_panels() const {
    return shared_bytes(1, panels(dim_v)) <= kMostSharedBytes ? panels(dim_v) : panels(dim_v) / 2;
  }
  // Whether the last product of a tile and the first of the next are asked for together
  // (joined.cuh). More warpgroups than two hide the way from tile to tile anyway, and two of small
  // head dims are for problems of about one tile an SM.
  constexpr bool joins_tiles() const { return warpgroups == 2 && dim_qk >= 128 && q_stages() == 2; }
  // Whether there are registers for the code that leaves parts.
  constexpr bool takes_parts() const { return warpgroups <= 3 && !resident; }
  constexpr int threads() const { return kWarpgroup * (warpgroups + (resident ? 0 : 1)); }

  // Registers of a thread: all begin with the same number, then the warpgroup of the one thread
  // that loads gives most of its own to the others. setmaxnreg takes multiples of eight.
  constexpr int registers() const { return kRegistersOfSm / threads() / 8 * 8; }
  constexpr int giver() const { return warpgroups == 2 ? 40 : 32; }
  constexpr int taker() const {
    return (registers() * (warpgroups + 1) - giver()) / warpgroups / 8 * 8;
  }
};

// A configuration as a type: what kernels are instantiated with.
template <typename T, int kDimQk, int kDimV, int kWarpgroups, int kTileKv, int kUnroll = 1,
          int kStages = 2, bool kCapped = false, bool kResident = false>
struct ForwardShape {
  using Element = T;
  static constexpr ForwardConfig kConfig = {kDimQk,  kDimV,   kWarpgroups, kTileKv,
                                            kStages, kUnroll, kCapped,     kResident};
};

}  // namespace fovea::cuda::hopper
