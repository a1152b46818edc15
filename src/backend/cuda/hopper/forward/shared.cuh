// A block's shared memory: every buffer, every barrier, and what the producer tells the consumers
// about the tile to work on.
#pragma once

#include "backend/cuda/hopper/forward/arguments.h"
#include "backend/cuda/hopper/forward/config.h"
#include "prim/cuda/tile/ring.cuh"
#include "prim/cuda/tile/swizzled.h"

namespace fovea::cuda::hopper {

// What Work::tile says where there is no tile: that none will come, or, where tiles are joined,
// that one may: the last, which is still being worked on and may have to be done again.
inline constexpr int kNoTile = -1, kPerhaps = -2;

// A tile of rows and the blocks of keys that they see.
struct Work {
  int tile;  // negative: see above
  int care;
  int b, head;
  int row;            // first, within the sequence; negative: before it
  int q_len, kv_len;  // of the sequence
  int q_row, kv_row;  // packed: the sequence's first
  int batch_at;       // packed: 0
  int part;           // of the keys
  int begin, end;     // blocks of keys
};

// Two tiles at once: one that is finished and one that begins.
inline constexpr int kSlots = 2;

template <typename Shape>
struct Shared {
  static constexpr ForwardConfig kC = Shape::kConfig;
  using TileQ = tile::SwizzledTile<kRowsOfWarpgroup, kC.dim_qk>;  // of a warpgroup
  using TileK = tile::SwizzledTile<kC.tile_kv, kC.dim_qk>;
  using TileV = tile::SwizzledTile<kC.tile_kv, kC.dim_v>;
  // A pass's share of the outputs.
  using TileOut = tile::SwizzledTile<kRowsOfWarpgroup, kC.out_panels() * tile::kPanelColumns>;

  alignas(tile::kTileAlignment) unsigned char q[kC.q_stages()][kC.warpgroups][TileQ::kBytes];
  unsigned char out[kC.warpgroups][TileOut::kBytes];
  unsigned char k[kC.stages][TileK::kBytes];
  unsigned char v[kC.stages][TileV::kBytes];

  // The loading thread fills all of them; what frees them is said here.
  tile::RingBarriers<kC.q_stages()> q_ring[kC.warpgroups];  // the warps of a warpgroup
  tile::RingBarriers<kC.stages> k_ring;                     // every computing warp
  tile::RingBarriers<kC.stages> v_ring;                     // every computing warp
  tile::RingBarriers<kSlots> work_ring;                     // every computing warp
  Work work[kSlots];
  int failed[kSlots];             // care that the tile of a slot needs and did not get
  int usual_care[kC.warpgroups];  // that tiles get at least
  int out_of_range;               // whether any warpgroup met such scores

  __device__ __forceinline__ void init() {
    constexpr int kWarps = 4;
    for (int w = 0; w < kC.warpgroups; ++w) q_ring[w].init(kWarps);
    k_ring.init(kC.warpgroups * kWarps);
    v_ring.init(kC.warpgroups * kWarps);
    work_ring.init(kC.warpgroups * kWarps);
    for (int slot = 0; slot < kSlots; ++slot) failed[slot] = kBold;
    for (int& care : usual_care) care = kBold;
    out_of_range = 0;
    ptx::mbarrier_init_fence();
  }
};

// Barriers of the hardware, besides those in shared memory: 1 .. hand the tensor cores from one
// warpgroup to the next, the ones from kOwnBarrier on join the warps of a warpgroup.
inline constexpr int kTurnBarrier = 1, kOwnBarrier = 5;

}  // namespace fovea::cuda::hopper
