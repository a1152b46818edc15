// The shape of one forward kernel: everything that is fixed when it is compiled.
#pragma once

#include <type_traits>

namespace fovea::cuda {

// How values are multiplied: on tensor cores 16-bit ones and floats rounded to tf32, and floats by
// exact multiply-adds.
enum class Products { kHalf, kTf32, kExact };

// Of the element type of a kernel.
template <typename T>
inline constexpr Products kProductsOf = sizeof(T) == 2             ? Products::kHalf
                                        : std::is_same_v<T, float> ? Products::kExact
                                                                   : Products::kTf32;

constexpr int element_bytes(Products products) { return products == Products::kHalf ? 2 : 4; }

// What is done to scores besides a scale and a range of visible keys. kComputed: softcap or ALiBi.
// kBias, kMask: one of them alone. kAny: all of it together, dropout, odd scales.
enum class Terms { kNone, kComputed, kBias, kMask, kAny };
constexpr bool is_one_term(Terms t) { return t != Terms::kNone && t != Terms::kAny; }
// Of rows there are enough for every warp to have its own; or two, or four warps hold the same
// ones, each for its share of the keys, so that few rows keep more of the GPU busy. kCrowded: there
// are so many that one more block to an SM is worth its fewer registers.
enum class Width { kWide, kPairs, kQuads, kCrowded };

// Bytes of a row of a tile in shared memory, as tile::SharedTile lays it out.
constexpr int shared_row_bytes(Products products, int dim) {
  return element_bytes(products) * dim + (products == Products::kExact ? 16 : 0);
}

// What every GPU since Ampere gives a block, less a block's own variables.
constexpr int kOwnSharedBytes = 1024;
constexpr int kLeastSharedBytes = 99 * 1024 - kOwnSharedBytes;

struct ForwardConfig {
  int dim_qk, dim_v;  // padded
  Products products;
  int warps;
  int key_warps;  // warps that hold the same rows, each for its share of the keys
  int m_tiles;    // 16-row tiles of a warp
  int tile_kv;    // keys of a stage in shared memory
  int chunk_kv;   // keys whose scores are in registers at once
  int blocks;     // of an SM, at least: what the registers are bounded by
  bool q_in_registers;
  Width width;
  Terms terms;

  static constexpr int kStages = 2;

  constexpr int threads() const { return 32 * warps; }
  // Of a row of Q in registers, 32 bytes each.
  constexpr int q_pieces() const {
    return q_in_registers ? dim_qk * element_bytes(products) / 32 : 1;
  }
  // Whether blocks that all run at once come in rounds, a block an SM, every other one the other
  // way round: the shortest of a causal mask beside the longest.
  constexpr bool in_rounds() const { return key_warps > 1 || dim_qk == 16; }
  // Turns of the loop over keys are so short that it shows in their schedule how code around them
  // is written.
  constexpr bool short_turns() const { return dim_qk <= 32; }
  // And so short that what is asked at each tile shows too: tiles that are seen whole are walked
  // through without.
  constexpr bool walks() const {
    return short_turns() && key_warps == 1 && terms == Terms::kNone && products == Products::kHalf;
  }
  constexpr int tile_q() const { return warps / key_warps * 16 * m_tiles; }
  constexpr int shared_bytes() const {
    return (tile_q() + kStages * tile_kv) * shared_row_bytes(products, dim_qk) +
           kStages * tile_kv * shared_row_bytes(products, dim_v) + tile_q() * term_row_bytes();
  }
  // What terms keep about a row of the tile: where it begins, or its slope; and of a bias 64 keys.
  constexpr int term_row_bytes() const {
    if (terms == Terms::kBias) return 8 + 64 * element_bytes(products);
    return terms == Terms::kMask || terms == Terms::kComputed ? 8 : 0;
  }
};

// 32 rows a warp halve what ldmatrix reads of K and V per row; where their sums do not fit the
// registers, or more warps hide more latency than that saves, 16.
constexpr ForwardConfig forward_config(Products products, int dim_qk, int dim_v, Terms terms,
                                       Width width) {
  ForwardConfig c{dim_qk, dim_v, products, 4, 1, 2, 64, 32, 2, false, width, terms};
  if (dim_qk <= 64) {
    c.tile_kv = dim_qk <= 32 ? 256 : 128;
    c.q_in_registers = true;
  }
  if (dim_qk <= 32) c.blocks = dim_qk == 16 ? 4 : 3;
  if (dim_qk >= 32 && dim_qk <= 128) c.chunk_kv = 64;
  if (dim_qk > 128) c.tile_kv = 32;
  if (dim_v > 128) c.m_tiles = 1;
  // What is fetched of a mask needs registers, of a bias shared memory.
  if (dim_qk > 64 && terms == Terms::kMask) c.chunk_kv = 32;
  if (dim_qk > 64 && terms == Terms::kBias) c.chunk_kv = c.tile_kv = 48;
  if (terms == Terms::kAny) {
    c.chunk_kv = dim_qk > 64 ? 16 : 32;  // their loads and the dropout generator need registers
    c.tile_kv = dim_qk > 128 ? 32 : 64;
    c.blocks = 2;
  }
  if (width == Width::kCrowded) ++c.blocks;
  if (width == Width::kPairs || width == Width::kQuads) {
    c.key_warps = width == Width::kPairs ? 2 : 4;
    c.warps = width == Width::kPairs ? 8 : 4;
    c.m_tiles = 1;
    c.chunk_kv = dim_qk > 64 ? 16 : 32;
    // A tile more is a barrier more for warps that have few chunks each.
    const bool small = width == Width::kPairs && dim_qk <= 32;
    c.tile_kv = small ? 8192 / dim_qk : dim_qk > 64 ? 64 : 128;
    c.blocks = 16 / c.warps;
  }
  if (products == Products::kTf32) {
    // Two stages beside 128 rows of Q: at 128 shared memory leaves no room for more keys.
    c.tile_kv = dim_qk > 64 ? 16 : 64;
    c.chunk_kv = dim_qk > 64 ? 16 : 32;
    if (dim_qk > 128) c.warps = 2;
  }
  if (products == Products::kExact) {
    c.q_in_registers = false;
    c.m_tiles = 1;
    c.blocks = 1;
    c.tile_kv = dim_qk > 64 ? 16 : 32;
    c.chunk_kv = 16;
    if (dim_qk > 128) c.warps = 2;
  }
  return c;
}

// A configuration as a type: what kernels are instantiated with.
template <typename T, int kDimQk, int kDimV, Terms kTerms, Width kWidth = Width::kWide>
struct ForwardShape {
  using Element = T;
  static constexpr ForwardConfig kConfig =
      forward_config(kProductsOf<T>, kDimQk, kDimV, kTerms, kWidth);
  static_assert(kConfig.shared_bytes() <= kLeastSharedBytes);
};

}  // namespace fovea::cuda
