// The shapes of the backward kernels of one pair of head dims.
#pragma once

#include "backend/cuda/portable/forward/config.h"

namespace fovea::cuda {

// dK and dV: a block holds a tile of keys and walks over the query rows that see them.
// dQ: a block holds a tile of query rows and walks over keys, as forward does.
struct BackwardConfig {
  int dim_qk, dim_v;
  int key_warps;  // dK, dV: warps of a block, 16 * key_m_tiles keys each
  int key_m_tiles;
  int key_tile_q;  // dK, dV: query rows of a stage
  bool split;      // dK and dV in launches of their own: their sums together exceed the registers
  int row_m_tiles;  // dQ: 16-row tiles of each of 4 warps
  int row_tile_kv;  // dQ: keys of a stage
  Terms terms;

  static constexpr int kRowWarps = 4;
  static constexpr int kStages = 2;
  static constexpr int kChunk = 16;  // rows or keys whose scores are in registers at once

  constexpr int key_tile() const { return key_warps * 16 * key_m_tiles; }
  constexpr int key_threads() const { return 32 * key_warps; }
  constexpr int row_tile() const { return kRowWarps * 16 * row_m_tiles; }
  constexpr int row_threads() const { return 32 * kRowWarps; }
  constexpr int key_shared_bytes() const {
    return 2 * (key_tile() + kStages * key_tile_q) * (dim_qk + dim_v) +
           kStages * key_tile_q * 2 * 4;
  }
  constexpr int row_shared_bytes() const {
    return 2 * (row_tile() + kStages * row_tile_kv) * (dim_qk + dim_v);
  }
};

constexpr BackwardConfig backward_config(int dim_qk, int dim_v, Terms terms) {
  BackwardConfig c{dim_qk, dim_v, 4, 2, 64, false, 2, 64, terms};
  if (dim_qk > 64) {
    c.key_m_tiles = 1;
    c.key_tile_q = 32;
    c.row_m_tiles = 1;
  }
  if (dim_qk > 128) {
    c.key_tile_q = 16;
    c.row_tile_kv = 16;
    c.split = dim_v > 128 || terms == Terms::kAny;
  }
  if (terms == Terms::kAny) c.key_m_tiles = c.row_m_tiles = 1;
  return c;
}

template <int kDimQk, int kDimV, bool kAnyTerms>
struct BackwardShape {
  static constexpr BackwardConfig kConfig =
      backward_config(kDimQk, kDimV, kAnyTerms ? Terms::kAny : Terms::kNone);
};

}  // namespace fovea::cuda
