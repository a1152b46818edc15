// The shapes of the backward kernels of one pair of head dims.
#pragma once

#include "backend/cuda/portable/forward/config.h"

namespace fovea::cuda {

// Keys: a block holds a tile of keys and walks over the query rows that see them, for dK and dV,
// and for dQ too when all is done in one pass.
// Rows: a block holds a tile of query rows and walks over keys, as forward does, for dQ alone.
struct BackwardConfig {
  int dim_qk, dim_v;
  Products products;
  int key_warps;  // keys: warps of a block, 16 * key_m_tiles keys each
  int key_m_tiles;
  bool keys_in_registers;  // keys: K and V, besides
  int query_warps;         // keys: warps that share their keys, and split queries and columns
  int key_tile_q;          // keys: query rows of a stage
  int dq_row_warps;        // keys: warps over the rows of a tile's dQ, the others over its columns;
                           // 0: dQ is left to the rows' kernel
  bool split;     // dK and dV in launches of their own: their sums together exceed the registers
  int row_warps;  // rows: warps of a block, 16 * row_m_tiles rows each
  int row_m_tiles;
  int row_tile_kv;             // rows: keys of a stage
  int key_blocks, row_blocks;  // of an SM, at least: what the registers are bounded by
  int chunk;  // rows or keys whose scores are in registers at once: independent sums hide latency
  int masked_chunk;  // of tiles of which something is hidden, whose masks need registers too
  // Keys: what it takes, in rows that a block works on, to have their rows in parts, and a part
  // (plan.cc); 0: parts are not weighed.
  int of_sums, of_part;
  bool small_heads;     // keys: the pass that does all is the one of small heads
  bool dq_of_products;  // ... in which the warps' shares of dQ meet, not their gradients of scores
  int long_tile_q;      // ... and which has larger stages for many rows; 0: it has none
  Terms terms;

  static constexpr int kStages = 2;
  static constexpr int kSumTile = 128;     // rows of a tile of sums: a multiple of every tile
  static constexpr int kSumThreads = 256;  // that round them

  constexpr bool one_pass() const { return dq_row_warps > 0; }
  constexpr BackwardConfig of_long_tiles() const {
    BackwardConfig c = *this;
    c.key_tile_q = long_tile_q;
    return c;
  }
  // One term alone, for which the pass that does all has kernels of its own.
  constexpr bool one_term() const { return is_one_term(terms); }
  // Words of a query row in shared memory: lse2, delta, what it sees, and what its term needs.
  static constexpr int row_stats(Terms terms) { return is_one_term(terms) ? 6 : 4; }
  constexpr int row_stats() const { return row_stats(terms); }
  constexpr int key_tile() const { return key_warps / query_warps * 16 * key_m_tiles; }
  constexpr int key_threads() const { return 32 * key_warps; }
  constexpr int row_tile() const { return row_warps * 16 * row_m_tiles; }
  constexpr int row_threads() const { return 32 * row_warps; }
  constexpr int pair_bytes() const {  // a row of both dims
    return shared_row_bytes(products, dim_qk) + shared_row_bytes(products, dim_v);
  }
  constexpr int score_bytes() const { return key_tile() * key_tile_q * element_bytes(products); }
  // Keys in registers leave their memory to dQ, or K's stays for it.
  constexpr int small_shared_bytes() const {
    const int keys = key_tile() * pair_bytes();
    const int rows = kStages * key_tile_q * (pair_bytes() + row_stats() * 4);
    const int sums = kStages * key_warps * key_tile_q * dim_qk * 4;
    if (dq_of_products) return rows + (sums > keys ? sums : keys);
    return rows + keys + kStages * score_bytes();
  }
  // For the pass that does all, two stages of gradients of scores; weights too, where warps share.
  constexpr int key_shared_bytes() const {
    if (small_heads) return small_shared_bytes();
    const int scores = (one_pass() ? kStages : 0) + (query_warps > 1 ? 1 : 0);
    return (key_tile() + kStages * key_tile_q) * pair_bytes() +
           kStages * key_tile_q * row_stats() * 4 + scores * score_bytes();
  }
  constexpr int row_shared_bytes() const {
    return (row_tile() + kStages * row_tile_kv) * pair_bytes();
  }
};

// The two kernels, which are there for every GPU: their shared memory stays below what each since
// Ampere gives a block.
constexpr BackwardConfig backward_config(Products products, int dim_qk, int dim_v, Terms terms) {
  BackwardConfig c{};
  c.dim_qk = dim_qk;
  c.dim_v = dim_v;
  c.products = products;
  c.terms = terms;
  c.key_warps = c.row_warps = 4;
  c.key_m_tiles = c.row_m_tiles = 2;
  c.key_tile_q = c.row_tile_kv = 64;
  c.key_blocks = 2;
  c.row_blocks = 1;
  c.chunk = c.masked_chunk = 32;
  c.query_warps = 1;
  c.keys_in_registers = dim_qk == 32;
  if (dim_qk == 16) {
    c.key_blocks = 4;
    c.masked_chunk = 16;
  }
  if (dim_qk == 32) {
    c.key_blocks = 3;
    c.chunk = c.masked_chunk = 16;
  }
  if (dim_qk == 64) c.masked_chunk = 16;
  if (dim_qk > 64) {
    c.key_m_tiles = c.row_m_tiles = 1;
    c.row_tile_kv = 32;
    c.key_blocks = 1;
    c.row_blocks = 3;
  }
  if (dim_qk > 128) {
    c.key_tile_q = c.row_tile_kv = c.chunk = c.masked_chunk = 16;
    c.split = dim_v > 128 || terms == Terms::kAny;
    c.row_blocks = 1;
  }
  if (terms == Terms::kAny) {
    c.key_m_tiles = c.row_m_tiles = 1;
    c.chunk = c.masked_chunk = 16;
    c.key_blocks = 1;
    c.keys_in_registers = false;
  }
  if (products == Products::kTf32) {
    c.key_tile_q = c.row_tile_kv = dim_qk > 64 ? 16 : 32;
    c.chunk = c.masked_chunk = 16;
    if (dim_qk > 128) c.key_warps = c.row_warps = 1;  // whose tiles fill the shared memory
    c.key_blocks = c.row_blocks = 1;
    c.keys_in_registers = false;
  }
  if (products == Products::kExact) {
    c.key_m_tiles = c.row_m_tiles = 1;
    c.key_tile_q = c.row_tile_kv = c.chunk = c.masked_chunk = 16;
    c.key_warps = c.row_warps = dim_qk > 128 ? 1 : dim_qk > 64 ? 2 : 4;
    c.key_blocks = 1;
    c.keys_in_registers = false;
  }
  return c;
}

// The pass that does all, of 16-bit values and head dims whose sums fit the registers.
constexpr BackwardConfig one_pass_config(Products products, int dim_qk, int dim_v, Terms terms) {
  BackwardConfig c = backward_config(products, dim_qk, dim_v, terms);
  if (products != Products::kHalf || dim_qk > 128) return c;
  c.dq_row_warps = dim_qk == 64 || dim_qk == 128 ? 2 : 4;
  if (dim_qk == 64) {
    c.of_sums = 182;
    c.of_part = 120;
  }
  if (dim_qk <= 32 && dim_v == dim_qk && terms == Terms::kNone) {
    c.small_heads = c.keys_in_registers = true;
    c.dq_of_products = dim_qk == 16;
    if (dim_qk == 16) {
      c.key_m_tiles = 4;
      c.long_tile_q = 128;
    }
    c.key_blocks = 2;
    return c;
  }
  if (dim_qk > 64 && terms != Terms::kAny) {
    c.key_warps = 8;
    c.query_warps = c.key_m_tiles = 2;
  }
  if (dim_qk > 64 && terms == Terms::kAny) {
    c.key_tile_q = 32;
    c.dq_row_warps = c.key_blocks = 2;
  }
  if (c.one_term()) c.masked_chunk = 16;
  return c;
}

// The one launch of short sequences (backward/short.cuh).
struct ShortConfig {
  int dim;
  int warps;        // of a block
  int key_m_tiles;  // blocks of keys: 16 keys each, that all warps hold
  int row_m_tiles;  // blocks of rows: 16 rows each, that `row_sharing` warps hold
  int row_sharing;
  int stages;  // of what a warp walks over
  int blocks;  // of an SM, at least

  constexpr int threads() const { return 32 * warps; }
  constexpr int key_tile() const { return 16 * key_m_tiles; }
  constexpr int row_tile() const { return 16 * row_m_tiles; }
};
constexpr ShortConfig short_config(int dim) { return {dim, 8, 32 / dim, 32 / dim, 2, 3, 2}; }

template <typename T, int kDimQk, int kDimV, Terms kTerms>
struct BackwardShape {
  using Element = T;
  static constexpr BackwardConfig kConfig = backward_config(kProductsOf<T>, kDimQk, kDimV, kTerms);
  static constexpr BackwardConfig kOnePass = one_pass_config(kProductsOf<T>, kDimQk, kDimV, kTerms);
  static constexpr ShortConfig kShort = short_config(kDimQk);  // with small heads
  // Where a GPU has no memory for the one pass of a plain problem, or two runs have to give the
  // same bits, there are two kernels besides; of one term alone the pass of all terms serves.
  static constexpr bool kTwoKernels = kTerms == Terms::kNone || !kOnePass.one_pass();
  static_assert(kTerms != Terms::kAny || kOnePass.key_shared_bytes() <= kLeastSharedBytes);
  static_assert(!kTwoKernels || (kConfig.key_shared_bytes() <= kLeastSharedBytes &&
                                 kConfig.row_shared_bytes() <= kLeastSharedBytes));
};

// The same with the larger stages of many rows.
template <typename Shape>
struct LongTiles : Shape {
  static constexpr BackwardConfig kOnePass = Shape::kOnePass.of_long_tiles();
};

}  // namespace fovea::cuda
