// The shape of one forward kernel: everything that is fixed when it is compiled.
#pragma once

namespace fovea::cuda {

enum class Terms { kNone, kAny };  // kAny: bias, boolean mask, ALiBi, softcap, dropout, odd scales

struct ForwardConfig {
  int dim_qk, dim_v;  // padded
  int m_tiles;        // 16-row tiles of a warp
  int tile_kv;        // keys of a stage in shared memory
  int chunk_kv;       // keys whose scores are in registers at once
  int blocks;         // of an SM, at least: what the registers are bounded by
  Terms terms;

  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kStages = 2;

  constexpr int tile_q() const { return kWarps * 16 * m_tiles; }
  constexpr bool q_in_registers() const { return dim_qk <= 32; }
  constexpr int shared_bytes() const {
    return 2 * (tile_q() * dim_qk + kStages * tile_kv * (dim_qk + dim_v));
  }
};

// 32 rows a warp halve what ldmatrix reads of K and V per row; where their sums do not fit the
// registers, 16. Shared memory stays below the 99 KiB that every GPU since Ampere gives a block.
constexpr ForwardConfig forward_config(int dim_qk, int dim_v, Terms terms) {
  ForwardConfig c{dim_qk, dim_v, 2, 64, 32, 2, terms};
  if (dim_qk <= 32) c.tile_kv = 128;
  if (dim_v <= 32) c.blocks = 3;
  if (dim_qk > 128) c.tile_kv = 32;
  if (dim_v > 128 || terms == Terms::kAny) c.m_tiles = 1;
  if (terms == Terms::kAny) c.blocks = 2;
  return c;
}

// A configuration as a type: what kernels are instantiated with.
template <int kDimQk, int kDimV, bool kAnyTerms>
struct ForwardShape {
  static constexpr ForwardConfig kConfig =
      forward_config(kDimQk, kDimV, kAnyTerms ? Terms::kAny : Terms::kNone);
};

}  // namespace fovea::cuda
