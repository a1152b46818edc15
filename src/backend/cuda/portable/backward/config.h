// The shapes of the backward kernels of one pair of head dims.
#pragma once

#include "backend/cuda/portable/forward/config.h"

namespace fovea::cuda {

// dK and dV: a block holds a tile of keys and walks over the query rows that see them.
// dQ: a block holds a tile of query rows and walks over keys, as forward does.
struct BackwardConfig {
  int dim_qk, dim_v;
  int element_bytes;
  int key_warps;  // dK, dV: warps of a block, 16 * key_m_tiles keys each
  int key_m_tiles;
  int key_tile_q;  // dK, dV: query rows of a stage
  bool split;      // dK and dV in launches of their own: their sums together exceed the registers
  int row_warps;   // dQ: warps of a block, 16 * row_m_tiles rows each
  int row_m_tiles;
  int row_tile_kv;             // dQ: keys of a stage
  int key_blocks, row_blocks;  // of an SM, at least: what the registers are bounded by
  int chunk;  // rows or keys whose scores are in registers at once: independent sums hide latency
  Terms terms;

  static constexpr int kStages = 2;

  constexpr int key_tile() const { return key_warps * 16 * key_m_tiles; }
  constexpr int key_threads() const { return 32 * key_warps; }
  constexpr int row_tile() const { return row_warps * 16 * row_m_tiles; }
  constexpr int row_threads() const { return 32 * row_warps; }
  constexpr int pair_bytes() const {  // a row of both dims
    return shared_row_bytes(element_bytes, dim_qk) + shared_row_bytes(element_bytes, dim_v);
  }
  constexpr int key_shared_bytes() const {
    return (key_tile() + kStages * key_tile_q) * pair_bytes() + kStages * key_tile_q * 2 * 4;
  }
  constexpr int row_shared_bytes() const {
    return (row_tile() + kStages * row_tile_kv) * pair_bytes();
  }
};

constexpr BackwardConfig backward_config(int element_bytes, int dim_qk, int dim_v, Terms terms) {
  BackwardConfig c{dim_qk, dim_v, element_bytes, 4, 2, 64, false, 4, 2, 64, 1, 1, 32, terms};
  if (dim_qk > 64) {
    c.key_m_tiles = c.row_m_tiles = 1;
    c.row_tile_kv = 32;
    c.row_blocks = 3;
  }
  if (dim_qk > 128) {
    c.key_tile_q = c.row_tile_kv = c.chunk = 16;
    c.split = dim_v > 128 || terms == Terms::kAny;
    c.row_blocks = 1;
  }
  if (terms == Terms::kAny) {
    c.key_m_tiles = c.row_m_tiles = 1;
    c.chunk = 16;
  }
  if (element_bytes == 4) {
    c.key_m_tiles = c.row_m_tiles = 1;
    c.key_tile_q = c.row_tile_kv = c.chunk = 16;
    c.key_warps = c.row_warps = dim_qk > 128 ? 1 : dim_qk > 64 ? 2 : 4;
  }
  return c;
}

template <typename T, int kDimQk, int kDimV, bool kAnyTerms>
struct BackwardShape {
  using Element = T;
  static constexpr BackwardConfig kConfig =
      backward_config(sizeof(T), kDimQk, kDimV, kAnyTerms ? Terms::kAny : Terms::kNone);
};

}  // namespace fovea::cuda
