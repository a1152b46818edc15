// A block's shared memory: every buffer and every barrier, and which keys of which head it holds.
#pragma once

#include "backend/cuda/hopper/backward/arguments.h"
#include "backend/cuda/hopper/backward/config.h"
#include "backend/cuda/portable/backward/ladder.cuh"
#include "prim/cuda/tile/ring.cuh"
#include "prim/cuda/tile/swizzled.h"

namespace fovea::cuda::hopper {

// A block's keys and the tiles of query rows that it walks over: those that see them of every head
// of the group, head by head.
template <typename Shape>
struct KeyWork {
  static constexpr BackwardConfig kC = Shape::kConfig;

  Place place;                    // key_begin: the first key
  int row;                        // of the first tile, in its head
  int row_begin;                  // of every head's first tile
  int head;                       // within the group, of the first tile
  int head_tiles;                 // of a head
  int count;                      // of tiles, from the first on
  int2 clear;                     // rows of a head that see all keys
  int2 clear_of[kC.keys() / 64];  // that see all of 64 keys
  int64_t sum_row;                // of the group's first row of dq

  __device__ __forceinline__ void find(const cuda::BackwardArguments& a) {
    const Problem& p = a.p;
    const int item = a.of_parts(blockIdx.x), part = blockIdx.x - item * a.row_parts;
    // First keys first, whose rows are the most where queries do not see later ones; or head by
    // head.
    const int heads = a.batch * p.head_kv, tiles = (p.kv_len + kC.keys() - 1) / kC.keys();
    const int first = a.first_keys_first ? a.of_heads(item) : item / tiles;
    const int second = item - first * (a.first_keys_first ? heads : tiles);
    const int of_all = a.first_keys_first ? second : first;
    place.b = a.of_head_kv(of_all);
    place.head_kv = of_all - place.b * p.head_kv;
    place.s = sequence_at(p, place.b);
    place.key_begin = (a.first_keys_first ? first : second) * kC.keys();
    place.key_end = min(place.key_begin + kC.keys(), place.s.kv_len);
    clear = clear_rows(p, place.s, place.key_begin, place.key_begin + kC.keys());
    for (int tile = 0; tile < kC.keys() / 64; ++tile) {
      const int begin = place.key_begin + tile * 64;
      clear_of[tile] = clear_rows(p, place.s, begin, begin + 64);
    }
    const int2 rows = seeing_rows(p, place.s, place.key_begin, place.key_end);
    row_begin = rows.x / kC.kSumRows * kC.kSumRows;
    head_tiles = (rows.y - row_begin + kC.rows() - 1) / kC.rows();
    const int all = head_tiles * p.group, begin = a.of_parts(part * all);
    count = a.of_parts((part + 1) * all) - begin;
    head = head_tiles > 0 ? begin / head_tiles : 0;
    row = row_begin + (begin - head * head_tiles) * kC.rows();
    sum_row = query_sum_row(p, place);
  }
};

// Where a walk over tiles is.
template <typename Shape>
struct WalkedTile {
  int row, head;

  __device__ __forceinline__ explicit WalkedTile(const KeyWork<Shape>& work)
      : row(work.row), head(work.head), work_(&work) {}
  __device__ __forceinline__ void advance() {
    constexpr int kRows = Shape::kConfig.rows();
    row += kRows;
    if (row >= work_->row_begin + work_->head_tiles * kRows) {
      row = work_->row_begin;
      ++head;
    }
  }

 private:
  const KeyWork<Shape>* work_;
};

template <typename Shape>
struct BackwardShared {
  static constexpr BackwardConfig kC = Shape::kConfig;
  static constexpr int kScoreStages = 2;
  using TileQ = tile::NarrowTile<kC.rows()>;
  using TileK = tile::NarrowTile<kC.keys()>;
  // Gradients of scores, a key a row; a panel is the rows whose dq a warpgroup makes.
  using TileDs = tile::SwizzledTile<kC.keys(), kC.rows()>;
  static_assert(kC.dim == tile::kNarrowColumns && TileDs::kPanels == kC.warpgroups);

  alignas(tile::kTileAlignment) unsigned char ds[kScoreStages][TileDs::kBytes];
  unsigned char q[kC.stages][TileQ::kBytes];
  unsigned char dout[kC.stages][TileQ::kBytes];
  unsigned char k[TileK::kBytes];  // finite
  static constexpr int kDoutAfterQ = kC.stages * TileQ::kBytes, kKeysAfterQ = 2 * kDoutAfterQ;
  // -delta in parts, which their product with ones adds to dout . v.
  alignas(tile::kTileAlignment) uint4 delta[kC.stages][kC.rows()];
  // The same of -lse2 where scores are exponents; else lse2 itself, as floats.
  uint4 minus_lse[kC.stages][kC.rows()];
  uint4 ones[8];  // eight rows, all there are

  __device__ __forceinline__ float* lse2(int stage) {
    return reinterpret_cast<float*>(minus_lse[stage]);
  }

  tile::RingBarriers<kC.stages> rows_ring;   // the loading warps fill, every computing one frees
  tile::RingBarriers<kScoreStages> ds_ring;  // every computing warp fills and frees
  uint64_t landed;                           // rows that are looked at before others get them
  KeyWork<Shape> work;
  int2 seeing[kC.keys()];  // rows of a head that see a key

  // Half of a value, for wgmma reads the eight columns twice; in bf16 whatever T is, for its range.
  // Three parts hold a float.
  static __device__ __forceinline__ uint4 parts_of(float x) {
    constexpr auto kPack = ptx::pack<__nv_bfloat16>;
    const float half = 0.5f * x, rest = half - __uint_as_float(kPack(half, 0) << 16);
    const uint32_t two = kPack(half, rest);
    return {two, kPack(rest - __uint_as_float(two & 0xffff0000u), 0), 0, 0};
  }

  static constexpr int kWarps = 4 * kC.warpgroups;
  // Of so many threads that load; the first arrives once more, for the boxes.
  __device__ __forceinline__ void init(int loaders) {
    rows_ring.init(kWarps, loaders + 1);
    ds_ring.init(kWarps, kWarps);
    ptx::mbarrier_init(ptx::shared_address(&landed), loaders + 1);
    ptx::mbarrier_init_fence();
  }
};

}  // namespace fovea::cuda::hopper
