// Which layers are taken by tiles of tokens, and how their blocks of threads share them.
#pragma once

#include "layers/cuda/plan_parts.h"

namespace fovea::layers::cuda {

// Whether the kernels of tiles take a layer, if its weights fit. By sizes alone, as a plan knows
// them.
inline bool may_be_tiled(const Prologue& p, const Sizes& s, const Rotation& rotation) {
  if (p.z.dtype == DType::kF32 || !p.convolve || s.dim != kTileDim) return false;
  if (p.first.taps != kTileTaps || p.second.taps != kTileTaps) return false;
  if (p.first.blocks != 2 || p.first.block[0].group != kTileDim) return false;
  if (p.second.block[0].group != p.second.block[0].channels) return false;
  if (p.first.block[0].bias.given() || p.second.block[0].bias.given()) return false;
  return TileTurns::takes(rotation);
}

inline bool weights_begin_on_16_bytes(const Prologue& p) {
  return weights_begin_on_16_bytes(p.first) && weights_begin_on_16_bytes(p.second);
}

// The weights that a block holds of `own` heads of q, from the beginning of shared memory on; gives
// where they end. Of what it sums over it needs all: inputs forward, and backward outputs.
inline int set_tile_weights(const Prologue& p, bool backward, int own, TileWeights& weights) {
  int bytes = 0;
  const auto add = [&](TileWeight& to, const ConvBlock& from, bool of_own) {
    const int some = own * kTileDim, all = as_int(from.channels), group = as_int(from.group);
    const bool rows = of_own && (!backward || group == kTileDim);
    to.weight = from.weight.data;
    to.row_eights = group / 8;
    to.rows = rows ? some : all;
    to.row_step = rows ? some : 0;
    to.eights = Divider((of_own && !rows ? some : group) / 8);
    to.eight_step = of_own && !rows ? some / 8 : 0;
    to.offset = bytes;
    bytes += to.bytes();
  };
  add(weights.of[0], p.second.block[0], true);
  add(weights.of[1], p.second.block[1], false);
  add(weights.of[2], p.first.block[0], backward);  // forward makes u of all heads
  add(weights.of[3], p.first.block[1], false);
  return bytes;
}

// How tiles, heads and weights are cut among blocks; whether a pass goes this way, if its weights
// begin on 16 bytes. As many blocks share a tile as there are multiprocessors for, and more where
// their weights do not fit otherwise.
inline bool cut_tiles(const Prologue& p, const Sizes& s, const Rotation& rotation, bool backward,
                      Tiled& t) {
  if (!may_be_tiled(p, s, rotation)) return false;
  const int heads = as_int(p.mix.heads), heads_kv = as_int(p.mix.heads_kv);
  const int multiprocessors = fovea::cuda::device_attribute(cudaDevAttrMultiProcessorCount);
  const int most_bytes = fovea::cuda::device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  t.tiles_of_member = Divider(as_int(ceil_div(s.q_len, kTileTokens)));
  t.tiles = s.batch * static_cast<int>(t.tiles_of_member.by);
  int parts = 1, bytes = 0;
  const auto fits = [&] {
    const int begin = set_tile_weights(p, backward, heads / parts, t.weights);
    t.room = TileRoom::of(begin, s.qk, heads_kv, bytes);
    t.few = bytes <= kTileSharedBytes<true>;
    const int room = t.few ? kTileSharedBytes<true> : kTileSharedBytes<false>;
    return bytes <= room && room <= most_bytes;
  };
  while (heads % (2 * parts) == 0 && (!fits() || t.tiles * 2 * parts <= multiprocessors)) {
    parts *= 2;
  }
  if (!fits()) return false;
  t.heads = {std::countr_zero(static_cast<unsigned>(parts)), heads, heads_kv, heads / parts};
  t.blocks = std::min(t.tiles, std::max(multiprocessors / parts, 1)) * parts;
  // After forward comes attention, which has more blocks than multiprocessors where there are more
  // tokens, and they must be dealt out evenly.
  t.leaves_early = backward || parts >= 4;
  return true;
}

// Sets what both passes have, where they go this way.
inline bool set_tiles(const Prologue& p, const Sizes& s, const Rotation& rotation, bool backward,
                      Tiled& t) {
  if (!weights_begin_on_16_bytes(p) || !cut_tiles(p, s, rotation, backward, t)) return false;
  t.settled = p.settled;
  t.begins = p.begins;
  t.q_len = s.q_len;
  t.u_rows = s.u_rows;
  t.eights = Divider(s.qk / 8);
  t.fours = Divider(s.v / 4);
  t.turns = TileTurns::of(rotation);
  t.norm = norm_of(p.mix);
  t.z = rows_of(p.z, s.lead - s.reach);
  t.u = rows_of(p.u);
  t.qk = rows_of(p.qk);
  if (p.mixed.given()) t.keys = rows_of(p.mixed);
  if (p.inverses.given()) t.inverses = rows_of(p.inverses);
  return true;
}

// The gradients of weights and temperature that are asked for, after tiles have been taken back.
inline TileGradients tile_gradients(const PrologueGradients& g, const Sizes& s,
                                    const TileBackward& tiles, const Rows& dmixed, const Rows& du) {
  TileGradients all;
  const auto add = [&](TileGradient& to, const ConvBlock& block, const Rows& dy, const Rows& x,
                       int rows) {
    if (!block.weight.given()) return;
    to.to = block.weight.data;
    to.first = as_int(block.first);
    to.channels = as_int(block.channels);
    to.group = as_int(block.group);
    to.dy = dy;
    to.x = x;
    to.rows = rows;
    to.chunks_of_member = Divider(as_int(ceil_div(rows, kSliceRows)));
    to.chunks = s.batch * static_cast<int>(to.chunks_of_member.by);
    to.across = as_int(ceil_div(to.channels, kSlice));
    to.slices = to.across * (to.group < kSlice ? 1 : to.across);
    all.blocks += to.slices * kSliceBlocks;
  };
  add(all.of[0], g.second.block[0], dmixed, tiles.u, s.q_len);
  add(all.of[1], g.second.block[1], dmixed, tiles.u, s.q_len);
  add(all.of[2], g.first.block[0], du, tiles.z, s.u_rows);
  add(all.of[3], g.first.block[1], du, tiles.z, s.u_rows);
  if (g.dtemperature.given()) {
    all.slopes = tiles.temperature;
    all.temperature = g.dtemperature.data;
    all.temperatures = as_int(g.dtemperature.elements());
    all.slope_count = tiles.tiles * tiles.heads.heads_kv;
    all.blocks = std::max(all.blocks, kSliceBlocks);
  }
  return all;
}

}  // namespace fovea::layers::cuda
