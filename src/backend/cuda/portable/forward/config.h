// The shape of one forward kernel: everything that is fixed when it is compiled.
#pragma once

namespace fovea::cuda {

enum class Terms { kNone, kAny };  // kAny: bias, boolean mask, ALiBi, softcap, dropout, odd scales

// Bytes of a row of a tile in shared memory, as tile::SharedTile lays it out.
constexpr int shared_row_bytes(int element_bytes, int dim) {
  return element_bytes == 2 ? 2 * dim : 4 * dim + 16;
}

struct ForwardConfig {
  int dim_qk, dim_v;  // padded
  int element_bytes;
  int warps;
  int m_tiles;   // 16-row tiles of a warp
  int tile_kv;   // keys of a stage in shared memory
  int chunk_kv;  // keys whose scores are in registers at once
  int blocks;    // of an SM, at least: what the registers are bounded by
  Terms terms;

  static constexpr int kStages = 2;

  constexpr int threads() const { return 32 * warps; }
  constexpr int tile_q() const { return warps * 16 * m_tiles; }
  constexpr int shared_bytes() const {
    return (tile_q() + kStages * tile_kv) * shared_row_bytes(element_bytes, dim_qk) +
           kStages * tile_kv * shared_row_bytes(element_bytes, dim_v);
  }
};

// 32 rows a warp halve what ldmatrix reads of K and V per row; where their sums do not fit the
// registers, or more warps hide more latency than that saves, 16. Shared memory stays below the 99
// KiB that every GPU since Ampere gives a block.
constexpr ForwardConfig forward_config(int element_bytes, int dim_qk, int dim_v, Terms terms) {
  ForwardConfig c{dim_qk, dim_v, element_bytes, 4, 2, 64, 32, 2, terms};
  if (dim_qk <= 64) c.tile_kv = 128;
  if (dim_qk == 16) c.blocks = 4;
  if (dim_qk == 32) {
    c.warps = 8;
    c.tile_kv = 256;
  }
  if (dim_qk == 64) {
    c.warps = 8;
    c.m_tiles = 1;
  }
  if (dim_qk > 128) c.tile_kv = 32;
  if (dim_v > 128) c.m_tiles = 1;
  if (terms == Terms::kAny) {
    c.warps = 4;
    c.m_tiles = 1;
    c.tile_kv = dim_qk > 128 ? 32 : 64;
    c.blocks = 2;
  }
  if (element_bytes == 4) {
    c.m_tiles = 1;
    c.blocks = 1;
    c.tile_kv = dim_qk > 64 ? 16 : 32;
    c.chunk_kv = 16;
    if (dim_qk > 128) c.warps = 2;
  }
  return c;
}

// A configuration as a type: what kernels are instantiated with.
template <typename T, int kDimQk, int kDimV, bool kAnyTerms>
struct ForwardShape {
  using Element = T;
  static constexpr ForwardConfig kConfig =
      forward_config(sizeof(T), kDimQk, kDimV, kAnyTerms ? Terms::kAny : Terms::kNone);
};

}  // namespace fovea::cuda
