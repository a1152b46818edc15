// CCGQA's prologue on the GPU: views become plain values, scratch is cut up.
#include <algorithm>
#include <bit>

#include "base/ceil_div.h"
#include "layers/cuda/prologue.h"
#include "layers/cuda/prologue_plan.h"

namespace fovea::layers::cuda {
namespace {

// Cuts scratch into tensors; without any it only counts.
class Cut {
 public:
  explicit Cut(std::byte* scratch) : scratch_(scratch) {}

  void* bytes(int64_t count) {
    constexpr size_t kAlignment = 256;
    std::byte* const at = scratch_ != nullptr ? scratch_ + used_ : nullptr;
    used_ += (static_cast<size_t>(count) + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  }
  float* floats(int64_t count) { return static_cast<float*>(bytes(4 * count)); }
  size_t used() const { return used_; }

 private:
  std::byte* scratch_;
  size_t used_ = 0;
};

int as_int(int64_t x) { return static_cast<int>(x); }

// What the parts of a plan are made from.
struct Sizes {
  int batch, q_len, tokens, dim, qk, v;
  int margin = 0, reach = 0;  // rows before a token that the second, and that both, reach back to
  int u_rows = 0, lead = 0;
  bool depthwise = false;

  explicit Sizes(const Prologue& p)
      : batch(as_int(p.qk.sizes[0])),
        q_len(as_int(p.qk.sizes[1])),
        tokens(batch * q_len),
        dim(as_int(p.mix.dim)),
        qk(as_int(p.mix.qk_width())),
        v(as_int(p.mix.v_width())),
        lead(as_int(p.lead)) {
    if (!p.convolve) return;
    margin = as_int(p.second.taps) - 1;
    reach = as_int(p.first.taps) - 1 + margin;
    u_rows = margin + q_len;
    depthwise = p.first.block[0].group == 1;
  }
};

Coupling coupling_of(const HeadMix& mix, bool forward) {
  // With one query head to a KV head both couplings are the same.
  const bool all = mix.coupling == CcgqaCoupling::kAllHeads && mix.heads != mix.heads_kv;
  const Coupled kind = !mix.couple ? Coupled::kNone : all ? Coupled::kAllHeads : Coupled::kGroup;
  return Coupling::of(kind, as_int(mix.heads), as_int(mix.heads_kv), as_int(mix.dim), forward);
}

HeadNorm norm_of(const HeadMix& mix) {
  return {mix.norm, static_cast<float>(mix.length), mix.kind, mix.temperature.data};
}

// The weights of a convolution, packed for a product; `packs` gets the work.
void set_blocks(const Conv& conv, DType dtype, bool backward, Cut& cut, Packs& packs,
                TapProduct& product) {
  product.taps = as_int(conv.taps);
  product.blocks = conv.blocks;
  for (int n = 0; n < conv.blocks; ++n) {
    const ConvBlock& from = conv.block[static_cast<size_t>(n)];
    const int channels = as_int(from.channels), group = as_int(from.group);
    void* const packed = cut.bytes(from.channels * from.group * conv.taps * dtype_bytes(dtype));
    packs.add(from.weight.data, packed, product.taps, channels, group, backward);
    product.block[n] = {as_int(from.first), channels, group, packed,
                        backward ? nullptr : from.bias.data};
  }
}

// Moves a product of small heads to the kernel that is made for them, which takes weights as they
// are: they are not packed.
bool move_to_heads(const Conv& conv, DType dtype, TapProduct& product, HeadConv& heads) {
  if (dtype == DType::kF32) return false;
  const int taps = as_int(conv.taps), group = as_int(conv.block[0].group);
  if (!HeadConvShape<__half>::takes(group, taps)) return false;
  for (int n = 0; n < conv.blocks; ++n) {
    const ConvBlock& b = conv.block[static_cast<size_t>(n)];
    if (b.group != group || reinterpret_cast<uintptr_t>(b.weight.data) % 16 != 0) return false;
    product.block[n].weight = b.weight.data;
  }
  heads.product = product;
  heads.product.tile_cols = HeadConvShape<__half>::kCols / group * group;
  heads.pieces = Divider(group * taps / 8);
  product.blocks = 0;
  return true;
}

constexpr int kTileCols = 128;  // of products

// Columns of a tile of whole heads.
int whole_heads(int dim) { return std::max(1, kTileCols / dim) * dim; }

// A convolution for blocks that hold its weights whole, from `bytes` of shared memory on.
WholeConv whole_conv(const Conv& from, int& bytes) {
  WholeConv conv;
  conv.taps = as_int(from.taps);
  conv.blocks = from.blocks;
  for (int n = 0; n < from.blocks; ++n) {
    const ConvBlock& b = from.block[static_cast<size_t>(n)];
    const int channels = as_int(b.channels), group = as_int(b.group);
    conv.block[n] = {as_int(b.first), channels, group,
                     b.weight.data,   bytes,    Divider(group * conv.taps / 8)};
    bytes += channels * (group * conv.taps + kRowPadding) * 2;
  }
  return conv;
}

// Whether blocks of threads can hold the weights of both convolutions; sets where they lie, and
// what else a block has.
bool set_whole(const Prologue& p, const Sizes& s, WholeConv& first, WholeConv& second,
               WholeRoom& room) {
  if (p.z.dtype == DType::kF32 || !p.convolve || s.depthwise) return false;
  if (std::max(p.first.taps, p.second.taps) > kMostTaps) return false;
  for (const Conv* conv : {&p.first, &p.second}) {
    for (const ConvBlock& b : conv->block) {
      const bool aligned = reinterpret_cast<uintptr_t>(b.weight.data) % 16 == 0;
      if (!aligned || b.bias.given()) return false;
    }
  }
  int bytes = 0, device = 0, most = 0;
  first = whole_conv(p.first, bytes);
  second = whole_conv(p.second, bytes);
  room = WholeRoom::of(bytes, s.qk, s.dim, bytes);
  return bytes <= kWholeSharedBytes && cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) ==
             cudaSuccess &&
         most >= kWholeSharedBytes;
}

}  // namespace

ForwardPlan plan_forward(const Prologue& p, const RopeTable& rope, std::byte* scratch) {
  const Sizes s(p);
  const DType dtype = p.z.dtype;
  Cut cut(scratch);
  ForwardPlan plan;
  Before& before = plan.before;
  before.tokens = s.tokens;
  before.q_len = Divider(s.q_len);
  before.token_blocks = as_int(ceil_div(s.tokens, kTokensOfBlock));
  before.values = {s.v, p.mix.value_shift ? s.v / 2 : s.v, s.q_len, rows_of(p.z, s.lead, s.qk),
                   rows_of(p.v)};
  before.coupling = coupling_of(p.mix, true);
  before.coupling.x = rows_of(p.z, s.lead);
  if (before.coupling.kind == Coupled::kAllHeads) {
    before.coupling.sums = cut.floats(int64_t{s.tokens} * 2 * s.dim);
  }
  before.rotation = Rotation::of(rope, p.mix.positions);
  before.angles = cut.floats(int64_t{s.tokens} * 2 * s.dim);
  before.lanes = HeadLanes::of(s.dim);

  Finish finish;
  finish.coupling = before.coupling;
  finish.norm = norm_of(p.mix);
  finish.rotation = before.rotation;
  finish.angles = before.angles;
  finish.lanes = before.lanes;
  finish.lanes_of_row =
      before.lanes.lanes * as_int(std::bit_ceil(unsigned(whole_heads(s.dim) / s.dim)));
  finish.mixed = rows_of(p.mixed);
  finish.qk = rows_of(p.qk);
  const auto finish_alone = [&](const Rows& from) {
    plan.finish = {finish, from, whole_heads(s.dim), s.qk, s.tokens, Divider(s.q_len)};
  };
  if (!p.convolve) {
    finish_alone(rows_of(p.z, s.lead));
    plan.bytes = cut.used();
    return plan;
  }
  WholeForward& whole = plan.whole;
  if (scratch != nullptr && set_whole(p, s, whole.first, whole.second, whole.room)) {
    whole.span = Divider(s.q_len + s.reach);
    whole.all_rows = s.batch * (s.q_len + s.reach);
    whole.blocks = as_int(ceil_div(whole.all_rows, kWholeRows));
    whole.q_len = s.q_len;
    whole.reach = s.reach;
    whole.u_rows = s.u_rows;
    whole.width = s.qk;
    whole.tile_cols = whole_heads(s.dim);
    whole.values = before.values;
    whole.finish = finish;
    whole.z = rows_of(p.z, s.lead - s.reach);
    whole.u = rows_of(p.u);
    before.token_blocks = 0;
    return plan;
  }
  const Rows z = rows_of(p.z, s.lead - s.reach);
  if (s.depthwise) {
    const ConvBlock& block = p.first.block[0];
    before.depthwise = {
        as_int(p.first.taps), s.qk, s.batch * s.u_rows, Divider(s.u_rows), block.weight.data,
        block.bias.data,      z,    rows_of(p.u)};
    before.depthwise_blocks = depthwise_blocks(before.depthwise);
  } else {
    TapProduct& first = plan.first;
    Packs packs;
    set_blocks(p.first, dtype, false, cut, packs, first);
    first.from = z;
    first.to = rows_of(p.u);
    first.from_rows = s.reach + s.q_len;
    first.set_rows(s.batch, s.u_rows);
    first.tile_cols = kTileCols;
    if (!move_to_heads(p.first, dtype, first, plan.heads)) before.packs = packs;
  }
  TapProduct& second = plan.second;
  set_blocks(p.second, dtype, false, cut, before.packs, second);
  second.from = rows_of(p.u);
  second.from_rows = s.u_rows;
  second.set_rows(s.batch, s.q_len);
  second.to = finish.mixed;
  const bool heads_fit = s.dim <= kTileCols;
  second.ending = heads_fit ? Ending::kFinish : Ending::kStore;
  second.tile_cols = heads_fit ? whole_heads(s.dim) : kTileCols;
  second.finish = finish;
  if (!heads_fit) finish_alone(finish.mixed);
  plan.bytes = cut.used();
  return plan;
}

namespace {

// Sums over rows are made in about as many parts as fill a GPU, whichever it is.
constexpr int kBlocksAtOnce = 264;

// Gradients of a convolution's weights, dy being numbered as `rows` of each batch member.
WeightGradient plan_gradient(const Conv& to, DType dtype, const Rows& dy, const Rows& x, int batch,
                             int rows, Cut& cut, PartSums& sums) {
  WeightGradient a;
  a.dy = dy;
  a.x = x;
  a.taps = as_int(to.taps);
  a.rows = Divider(rows);
  a.all_rows = batch * rows;
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
  const int64_t steps = ceil_div(a.all_rows, depth);
  const int64_t parts = std::clamp<int64_t>(kBlocksAtOnce / (a.tiles[0] + a.tiles[1]), 1, steps);
  a.rows_of_part = as_int(ceil_div(steps, parts)) * depth;
  a.parts = as_int(ceil_div(a.all_rows, a.rows_of_part));
  count = 0;
  for (int n = 0; n < to.blocks; ++n) {
    const ConvBlock& block = to.block[static_cast<size_t>(n)];
    if (!block.weight.given()) continue;
    const int64_t elements = block.channels * block.group * to.taps;
    a.block[count].parts = cut.floats(elements * a.parts);
    sums.add(a.block[count++].parts, block.weight.data, elements, a.taps, a.parts);
  }
  return a;
}

void add_columns(ColumnSums& columns, ColumnSum sum, const TensorView& to, Cut& cut,
                 PartSums& sums) {
  if (!to.given()) return;
  const int each = std::max(sum.taps, 1);
  sum.parts = cut.floats(int64_t{columns.parts} * sum.channels * each);
  sum.tiles = as_int(ceil_div(sum.channels, kColumnsOfTile)) * each;
  columns.sum[columns.count++] = sum;
  sums.add(sum.parts, to.data, int64_t{sum.channels} * each, each, columns.parts);
}

}  // namespace

BackwardPlan plan_backward(const Prologue& p, const PrologueGradients& g, const RopeTable& rope,
                           std::byte* scratch) {
  const Sizes s(p);
  const DType dtype = p.z.dtype;
  Cut cut(scratch);
  BackwardPlan plan;
  const Rows dmixed = rows_of(g.dmixed, s.margin), dz = rows_of(g.dz);
  After& after = plan.after;
  after.tokens = s.tokens;
  after.q_len = Divider(s.q_len);
  after.lanes = HeadLanes::of(s.dim);
  after.token_blocks = as_int(ceil_div(s.tokens, kTokensOfBlock));
  after.values = {s.v, p.mix.value_shift ? s.v / 2 : s.v, s.q_len, rows_of(g.dv),
                  rows_of(g.dz, 0, s.qk)};
  after.coupling = coupling_of(p.mix, false);
  after.coupling.x = dmixed;
  if (after.coupling.kind == Coupled::kAllHeads) {
    after.coupling.sums = cut.floats(int64_t{s.tokens} * 2 * s.dim);
  }
  after.norm = norm_of(p.mix);
  after.rotation = Rotation::of(rope, p.mix.positions);
  after.dqk = rows_of(g.dqk);
  after.mixed = rows_of(p.mixed);
  after.dmixed = dmixed;
  if (p.mix.norm) after.slopes = cut.floats(int64_t{s.tokens} * p.mix.heads_kv);
  WholeBackward& whole = plan.whole;
  const int whole_span = s.u_rows + s.reach;
  const int whole_blocks = as_int(ceil_div(s.batch * whole_span, kWholeRows));
  if (scratch != nullptr && set_whole(p, s, whole.first, whole.second, whole.room)) {
    whole.blocks = whole_blocks;
  }
  if (g.dtemperature.given()) {
    const int parts = whole.blocks > 0 ? whole.blocks : after.token_blocks;
    const bool shared = p.mix.kind == KeyTemperature::kShared;
    after.temperature =
        cut.floats(std::max(whole_blocks, after.token_blocks) * p.mix.heads_kv);  // for either way
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
  if (!p.convolve) {
    plan.bytes = cut.used();
    return plan;
  }

  const Rows du = rows_of(g.du), z = rows_of(p.z, s.lead - s.reach);
  WeightGradients& weights = plan.weights;
  weights.of[0] =
      plan_gradient(g.second, dtype, dmixed, rows_of(p.u), s.batch, s.q_len, cut, plan.sums);
  if (!s.depthwise) {
    weights.of[1] = plan_gradient(g.first, dtype, du, z, s.batch, s.u_rows, cut, plan.sums);
  }
  weights.blocks = weights.of[0].blocks() + weights.of[1].blocks();
  if (whole.blocks > 0) {
    whole.span = Divider(whole_span);
    whole.all_rows = s.batch * whole_span;
    whole.q_len = s.q_len;
    whole.reach = s.reach;
    whole.margin = s.margin;
    whole.u_rows = s.u_rows;
    whole.width = s.qk;
    whole.after = after;
    whole.du = du;
    whole.dz = dz;
    after.token_blocks = 0;
    return plan;
  }
  TapProduct& second = plan.second;
  set_blocks(p.second, dtype, true, cut, after.packs, second);
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
    set_blocks(p.first, dtype, true, cut, packs, first);
    first.from = du;
    first.from_rows = s.u_rows;
    first.first_row = s.margin;
    first.to = dz;
    first.set_rows(s.batch, s.q_len);
    first.tile_cols = kTileCols;
    first.ending = Ending::kCouple;
    first.finish.coupling = after.coupling;
    if (!move_to_heads(p.first, dtype, first, plan.heads)) after.packs = packs;
  }
  plan.bytes = cut.used();
  return plan;
}

size_t prologue_scratch_bytes(const Prologue& p, const RopeTable& rope, Pass pass) {
  if (pass == Pass::kForward) return plan_forward(p, rope, nullptr).bytes;
  // As if every gradient were asked for.
  const auto asked = [](Conv conv) {
    for (ConvBlock& block : conv.block) block.weight.rank = block.bias.rank = 1;
    return conv;
  };
  PrologueGradients g;
  g.dqk = p.qk;
  g.dv = p.v;
  g.dmixed = p.mixed;
  g.du = p.u;
  g.dz = p.z;
  g.dtemperature.rank = p.mix.norm ? 1 : 0;
  g.first = asked(p.first);
  g.second = asked(p.second);
  return plan_backward(p, g, rope, nullptr).bytes;
}

cudaError_t prologue(const Prologue& p, const RopeTable& rope, std::byte* scratch,
                     cudaStream_t stream) {
  const ForwardPlan plan = plan_forward(p, rope, scratch);
  switch (p.z.dtype) {
    case DType::kBf16: return run<__nv_bfloat16>(plan, stream);
    case DType::kF16: return run<__half>(plan, stream);
    case DType::kF32: return run<float>(plan, stream);
    default: return cudaErrorInvalidValue;
  }
}

cudaError_t prologue_backward(const Prologue& p, const PrologueGradients& g, const RopeTable& rope,
                              std::byte* scratch, cudaStream_t stream) {
  const BackwardPlan plan = plan_backward(p, g, rope, scratch);
  switch (p.z.dtype) {
    case DType::kBf16: return run<__nv_bfloat16>(plan, stream);
    case DType::kF16: return run<__half>(plan, stream);
    case DType::kF32: return run<float>(plan, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace fovea::layers::cuda
