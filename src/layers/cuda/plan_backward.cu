// Backward as its kernels' arguments.
#include "layers/cuda/tile_plan.h"

namespace fovea::layers::cuda {
namespace {

// Sums over rows are made in as many parts as give about this many blocks of threads: together
// what fills a GPU, whichever it is. The first convolution's are far less work.
constexpr int kBlocksOfSecond = 264, kBlocksOfFirst = 264;

// What a gradient of weights sums over.
struct Summed {
  Rows dy, x;
  int batch, rows;  // of dy: members, and rows of each
  int blocks;
};

WeightGradient plan_gradient(const Conv& to, DType dtype, const Summed& over,
                             const WorkOfBlocks& work, Cut& cut, PartSums& sums) {
  WeightGradient a;
  a.dy = over.dy;
  a.x = over.x;
  a.taps = as_int(to.taps);
  a.rows = Divider(over.rows);
  a.all_rows = over.batch * over.rows;
  constexpr int kTile = GradientShape<float>::kTile;
  int count = 0;
  for (int n = 0; n < to.blocks; ++n) {
    const ConvBlock& block = to.block[static_cast<size_t>(n)];
    if (!block.weight.given()) continue;
    const int channels = as_int(block.channels), group = as_int(block.group);
    // The groups of a tile of outputs begin before it and end after it by less than one group,
    // unless groups fill tiles or the other way round.
    const bool fill = kTile % group == 0 || group % kTile == 0;
    const int reach = fill ? std::max(group, kTile) : kTile + 2 * (group - 1);
    const int in_tiles = as_int(ceil_div(std::min(reach, channels), kTile));
    a.block[count] = {as_int(block.first), channels, group, nullptr, in_tiles};
    a.tiles[count++] = as_int(ceil_div(channels, kTile)) * in_tiles * a.taps;
  }
  if (count == 0) return a;
  const int depth =
      dtype == DType::kF32 ? GradientShape<float>::kDepth : GradientShape<__half>::kDepth;
  const int64_t steps = std::max<int64_t>(ceil_div(a.all_rows, depth), 1);
  int64_t parts = std::clamp<int64_t>(over.blocks / (a.tiles[0] + a.tiles[1]), 1, steps);
  for (size_t n = 0; n < static_cast<size_t>(to.blocks); ++n) {
    const ConvBlock& block = to.block[n];
    const int64_t part = block.channels * block.group * to.taps * int64_t{sizeof(float)};
    parts = std::clamp<int64_t>(cut.room(work[n]) / part, 1, parts);
  }
  a.rows_of_part = as_int(ceil_div(steps, parts)) * depth;
  a.parts = as_int(ceil_div(a.all_rows, a.rows_of_part));
  count = 0;
  for (int n = 0; n < to.blocks; ++n) {
    const ConvBlock& block = to.block[static_cast<size_t>(n)];
    if (!block.weight.given()) continue;
    const int64_t elements = block.channels * block.group * to.taps;
    a.block[count].parts = cut.floats(work[static_cast<size_t>(n)], elements * a.parts);
    sums.add(a.block[count++].parts, block.weight.data, elements, a.taps, a.parts);
  }
  return a;
}

// Whether channels and tokens are many, in the second convolution.
bool is_dense(const Prologue& p) {
  constexpr int64_t kManyChannels = 256, kManyTokens = 2048;
  const ConvBlock& first = p.second.block[0];
  return p.convolve && p.z.dtype != DType::kF32 && first.group == first.channels &&
         first.channels >= kManyChannels && p.qk.sizes[0] * p.qk.sizes[1] >= kManyTokens;
}

// Rows of the batch's members follow each other alike in dmixed and in u, with as many between
// them.
bool rows_join(const Prologue& p, const PrologueGradients& g, const Sizes& s) {
  return g.dmixed.strides[1] == p.u.strides[1] &&
         (s.batch == 1 || g.dmixed.strides[0] == p.u.strides[0]);
}

// All rows at once: those of dmixed that are of no token are zeros.
void plan_dense(const Prologue& p, const PrologueGradients& g, const Sizes& s, Cut& cut,
                BackwardPlan& plan) {
  const int64_t size = dtype_bytes(p.z.dtype);
  const auto from = [&](const Rows& rows, const ConvBlock& block) {
    return static_cast<const std::byte*>(rows.data) + block.first * size;
  };
  size_t scratch = 0;
  for (const ConvBlock& block : g.second.block) {
    if (!block.weight.given()) continue;
    DenseGradient& d = plan.dense[plan.dense_count++];
    d.dy = from(rows_of(g.dmixed, s.margin), block);
    d.x = from(rows_of(p.u), block);
    d.row = p.u.strides[1];
    d.rows = int64_t{s.batch} * s.u_rows - s.margin;
    d.channels = as_int(block.channels);
    d.taps = as_int(g.second.taps);
    const int64_t elements = block.channels * block.channels * d.taps;
    const bool of_k = &block != &g.second.block[0];
    d.to = cut.floats(of_k ? Work::kSecondOfK : Work::kSecondOfQ, elements);
    plan.sums.add(d.to, block.weight.data, elements, d.taps, 1);
    if (cut.plans()) scratch = std::max(scratch, plan.others->scratch_bytes(d));
  }
  cut.bytes(Work::kProducts, static_cast<int64_t>(scratch));
}

void add_columns(ColumnSums& columns, ColumnSum sum, const TensorView& to, Cut& cut,
                 PartSums& sums) {
  if (!to.given()) return;
  const int each = std::max(sum.taps, 1);
  sum.parts = cut.floats(Work::kColumns, int64_t{columns.parts} * sum.channels * each);
  sum.tiles = as_int(ceil_div(sum.channels, kColumnsOfTile)) * each;
  columns.sum[columns.count++] = sum;
  sums.add(sum.parts, to.data, int64_t{sum.channels} * each, each, columns.parts);
}

}  // namespace

BackwardPlan plan_backward(const Prologue& p, const PrologueGradients& g, const RopeTable& rope,
                           Cut& cut, const DenseGradients* dense) {
  const Sizes s(p);
  const DType dtype = p.z.dtype;
  BackwardPlan plan;
  const Rows dmixed = rows_of(g.dmixed, s.margin), dz = rows_of(g.dz);
  After& after = plan.after;
  after.tokens = s.tokens;
  after.q_len = Divider(s.q_len);
  after.lanes = HeadLanes::of(s.dim);
  after.token_blocks = as_int(ceil_div(s.tokens, kTokensOfBlock));
  plan.values = {
      s.tokens,
      after.q_len,
      {s.v, p.mix.value_shift ? s.v / 2 : s.v, s.q_len, rows_of(g.dv), rows_of(g.dz, 0, s.qk)}};
  after.coupling = coupling_of(p.mix, false);
  after.coupling.x = dmixed;
  if (after.coupling.kind == Coupled::kAllHeads) {
    after.coupling.sums = cut.floats(Work::kSums, int64_t{s.tokens} * 2 * s.dim);
  }
  after.norm = norm_of(p.mix);
  after.rotation = Rotation::of(rope, p.mix.positions);
  after.dqk = rows_of(g.dqk);
  after.qk = rows_of(p.qk);
  if (p.mix.norm) {
    after.keys = rows_of(p.mixed);
    after.inverses = rows_of(p.inverses);
  }
  after.dmixed = dmixed;
  if (p.mix.norm) after.slopes = cut.floats(Work::kSlopes, int64_t{s.tokens} * p.mix.heads_kv);
  TileBackward& tiles = plan.tiles;
  const int tile_count = s.batch * as_int(ceil_div(s.q_len, kTileTokens));
  const bool tiled = !cut.plans() && set_tiles(p, s, after.rotation, true, tiles);
  if (g.dtemperature.given()) {
    const int parts = tiled ? tile_count : after.token_blocks;
    const bool shared = p.mix.kind == KeyTemperature::kShared;
    after.temperature = cut.floats(Work::kTemperature, std::max(tile_count, after.token_blocks) *
                                                           p.mix.heads_kv);  // for either way
    plan.sums.add(after.temperature, g.dtemperature.data, shared ? 1 : p.mix.heads_kv, 1,
                  shared ? parts * as_int(p.mix.heads_kv) : parts, true);
  }

  Spread& spread = plan.spread;
  if (!p.convolve || s.depthwise) {
    spread.tokens = s.tokens;
    spread.q_len = Divider(s.q_len);
    spread.channels = s.qk;
    spread.coupling = after.coupling;
    spread.from = dmixed;
    spread.to = dz;
  }
  if (!p.convolve) return plan;

  const Rows du = rows_of(g.du), z = rows_of(p.z, s.lead - s.reach);
  WeightGradients& weights = plan.weights;
  // Tiles are taken back by clusters, which leave no parts, or where a GPU has none by parts.
  // Should clusters meet weights that they do not take, which begin on odd addresses, there is
  // room for one part: a product over all rows has as much, and it wants more of dmixed than tiles
  // leave there.
  const auto clusters = [&] {
    return dtype == DType::kBf16 ? has_clusters<__nv_bfloat16>() : has_clusters<__half>();
  };
  Tiled cut_alone;
  const bool tile_sized = cut_tiles(p, s, after.rotation, true, cut_alone);
  const bool by_parts = tiled || (tile_sized && !clusters());
  const bool few = cut.plans() && tile_sized && clusters();
  if (dense != nullptr && is_dense(p) && rows_join(p, g, s) && !by_parts) {
    plan.others = dense;
    after.zero_rows = s.margin;
    plan_dense(p, g, s, cut, plan);
  } else {
    weights.of[0] = plan_gradient(
        g.second, dtype, {dmixed, rows_of(p.u), s.batch, s.q_len, few ? 1 : kBlocksOfSecond},
        {Work::kSecondOfQ, Work::kSecondOfK}, cut, plan.sums);
  }
  if (!s.depthwise) {
    weights.of[1] =
        plan_gradient(g.first, dtype, {du, z, s.batch, s.u_rows, few ? 1 : kBlocksOfFirst},
                      {Work::kFirstOfQ, Work::kFirstOfK}, cut, plan.sums);
  }
  weights.blocks = weights.of[0].blocks() + weights.of[1].blocks();
  if (tiled) {
    tiles.values = plan.values.values;
    tiles.coupling = after.coupling;
    tiles.dqk = after.dqk;
    tiles.dmixed = dmixed;
    tiles.du = du;
    tiles.dz = dz;
    tiles.temperature = after.temperature;
    if (clusters() && weights_begin_on_16_bytes(g.first) && weights_begin_on_16_bytes(g.second)) {
      plan.tile_gradients = tile_gradients(g, s, tiles, dmixed, du);
      weights = {};
      plan.sums = {};
    }
    if (p.makes_u_again) {
      set_first(p, s, cut, Work::kPackedAgain, after.packs, plan.again, plan.heads_again);
    }
    after.token_blocks = 0;
    return plan;
  }
  TapProduct& second = plan.second;
  set_blocks(p.second, dtype, true, cut, {Work::kPackedOfQ, Work::kPackedOfK}, after.packs, second);
  second.from = dmixed;
  second.from_rows = s.q_len;
  second.first_row = -s.margin;
  second.to = du;
  second.set_rows(s.batch, s.u_rows);
  second.tile_cols = kTileCols;
  plan.columns.parts = as_int(std::clamp<int64_t>(s.tokens / 256, 1, 64));
  if (s.depthwise) {
    spread.from = du;
    spread.taps = as_int(p.first.taps);
    spread.from_rows = s.u_rows;
    spread.reach = s.reach;
    spread.weight = p.first.block[0].weight.data;
    add_columns(plan.columns, {du, z, spread.taps, s.qk, s.batch * s.u_rows, Divider(s.u_rows)},
                g.first.block[0].weight, cut, plan.sums);
    add_columns(plan.columns, {du, {}, 0, s.qk, s.batch * s.u_rows, Divider(s.u_rows)},
                g.first.block[0].bias, cut, plan.sums);
    add_columns(plan.columns, {dmixed, {}, 0, s.qk, s.tokens, Divider(s.q_len)},
                g.second.block[0].bias, cut, plan.sums);
  } else {
    TapProduct& first = plan.first;
    Packs packs = after.packs;
    set_blocks(p.first, dtype, true, cut, {Work::kPackedFirst, Work::kPackedFirst}, packs, first);
    first.from = du;
    first.from_rows = s.u_rows;
    first.first_row = s.margin;
    first.to = dz;
    first.set_rows(s.batch, s.q_len);
    first.tile_cols = kTileCols;
    first.ending = Ending::kCouple;
    first.finish.coupling = after.coupling;
    if (!move_to_heads(p.first, dtype, first, plan.heads)) after.packs = packs;
    if (p.makes_u_again) {
      set_first(p, s, cut, Work::kPackedAgain, after.packs, plan.again, plan.heads_again);
    }
  }
  return plan;
}

}  // namespace fovea::layers::cuda
