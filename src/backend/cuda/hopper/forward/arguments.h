// What a Hopper forward kernel is handed.
#pragma once

#include <cuda.h>

#include "backend/cuda/common/parts.h"
#include "backend/cuda/hopper/forward/cap_series.h"

namespace fovea::cuda::hopper {

// How carefully a tile is worked on. Most tiles are weighed by the largest score of their first
// keys; where that went out of range they are done again with a running maximum, and where values
// that are not finite met hidden keys, again without those values. kFar: scores are not taken to be
// far below softcap's bound, where a series would do.
enum Care : int { kBold = 0, kSafe = 1, kClean = 2, kFar = 4 };

// The order in which tiles of rows are worked on: heads in sections whose K and V stay in the L2
// cache together; within a section the longest rows of all heads first (or head by head where all
// are equally long).
struct Schedule {
  int heads;          // batch * head_q
  int section_heads;  // of a section; the last one may have fewer
  int row_tiles;      // of a head: of the longest sequence
  int parts;          // that a tile's keys are cut into; one after another
  int part_keys;      // of a part, a multiple of the kernel's blocks
  int tiles;          // heads * row_tiles * parts
  int* ticket;        // counts tiles that were claimed; null: each block knows its own
  // Warpgroups take turns at asking for products. Otherwise each goes at its own pace, and leaves
  // out the first blocks of keys where its rows see nothing of them.
  bool turns;
};

struct ForwardArguments {
  CUtensorMap q, k, v, out;  // boxes of 64 columns; rows: 64 of q and out, tile_kv of k and v
  Problem p;
  Rows values, results;  // v and out, for what TMA does not do
  RowScalars lse;        // data may be null
  Parts parts;           // where keys are cut
  Care care;             // that every tile gets
  float to_log2;         // takes q . k to a score in log2 units
  CapSeries cap_series;  // where there is a softcap
  Schedule schedule;
};

}  // namespace fovea::cuda::hopper
