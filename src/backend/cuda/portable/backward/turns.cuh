// Turns at the sums of dq, where two runs have to give the same bits: to each tile of query rows
// the blocks of keys add one after another, those of the last keys first. Where queries see no
// later keys, those are the ones that come to it first.
#pragma once

#include "backend/cuda/portable/backward/arguments.h"
#include "backend/cuda/portable/geometry.cuh"
#include "prim/cuda/ptx/flag.cuh"

namespace fovea::cuda {

// The number of this block, for one thread to ask for. Those that others wait for have to begin
// before them, which nobody says of blockIdx: where there are turns, blocks are numbered as they
// begin, from a head's last tile of keys on.
template <int kTileKv>
__device__ __forceinline__ int block_in_turn(const BackwardArguments& a) {
  if (a.turns == nullptr) return blockIdx.x;
  const int tiles = (a.p.kv_len + kTileKv - 1) / kTileKv;
  const int nth = atomicAdd(a.turns, 1), tile = nth % tiles;
  return nth - tile + tiles - 1 - tile;
}

// Which of the blocks that add to a tile of rows this one is.
template <int kTileKv, int kTileQ>
__device__ __forceinline__ int turn_of(const BackwardArguments& a, const Place& place, int tile) {
  // The tiles of keys that these rows visit, in the order of turns.
  const RowSpan span = RowSpan::at(place.s, tile * kTileQ, kTileQ);
  const KeyTiles keys = key_tiles(a.p, place.s, span, kTileQ, 0, place.s.kv_len, kTileKv);
  return keys.index_of(place.key_begin / kTileKv);
}

// A warp adds to the same places of a tile in every block: it waits for that warp of others alone.
template <int kTileQ, int kWarps>
struct Turns {
  static __device__ __forceinline__ void wait(const BackwardArguments& a, int64_t sum_row, int tile,
                                              int turn) {
    if (a.turns != nullptr) ptx::wait_for_warp(count_of(a, sum_row, tile), turn);
  }
  static __device__ __forceinline__ void pass(const BackwardArguments& a, int64_t sum_row,
                                              int tile) {
    if (a.turns != nullptr) ptx::pass_for_warp(count_of(a, sum_row, tile));
  }

 private:
  // Of the blocks that have added to the tile; before the first is the number of blocks.
  static __device__ __forceinline__ int* count_of(const BackwardArguments& a, int64_t sum_row,
                                                  int tile) {
    return a.turns + 1 + (sum_row / kTileQ + tile) * kWarps + threadIdx.x / 32;
  }
};

}  // namespace fovea::cuda
