// The forward pass as its kernels' arguments.
#include "layers/cuda/tile_plan.h"

namespace fovea::layers::cuda {

ForwardPlan plan_forward(const Prologue& p, const RopeTable& rope, Cut& cut) {
  const Sizes s(p);
  const DType dtype = p.z.dtype;
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
    before.coupling.sums = cut.floats(Work::kSums, int64_t{s.tokens} * 2 * s.dim);
  }
  before.rotation = Rotation::of(rope, p.mix.positions);
  before.angles = cut.floats(Work::kAngles, int64_t{s.tokens} * 2 * s.dim);
  before.lanes = HeadLanes::of(s.dim);

  Finish finish;
  finish.coupling = before.coupling;
  finish.norm = norm_of(p.mix);
  finish.rotation = before.rotation;
  finish.angles = before.angles;
  finish.lanes = before.lanes;
  finish.lanes_of_row =
      before.lanes.lanes * as_int(std::bit_ceil(unsigned(whole_heads(s.dim) / s.dim)));
  finish.qk = rows_of(p.qk);
  if (p.mixed.given()) finish.keys = rows_of(p.mixed);
  if (p.inverses.given()) finish.inverses = rows_of(p.inverses);
  const auto finish_alone = [&](const Rows& from) {
    plan.finish = {finish, from, whole_heads(s.dim), s.qk, s.tokens, Divider(s.q_len)};
  };
  if (!p.convolve) {
    finish_alone(rows_of(p.z, s.lead));
    return plan;
  }
  if (!cut.plans() && set_tiles(p, s, before.rotation, false, plan.tiles)) {
    plan.tiles.values = before.values;
    if (p.begins) plan.tiles.values.first = 0;
    plan.tiles.coupling = before.coupling;
    if (!p.keeps_u) plan.tiles.u = {};
    before.token_blocks = 0;
    return plan;
  }
  WholeForward& whole = plan.whole;
  if (!cut.plans() && set_whole(p, s, whole.first, whole.second, whole.room)) {
    whole.span = Divider(s.q_len + s.reach);
    whole.all_rows = s.batch * (s.q_len + s.reach);
    whole.q_len = s.q_len;
    whole.reach = s.reach;
    whole.u_rows = s.u_rows;
    whole.width = s.qk;
    whole.tile_cols = whole_heads(s.dim);
    whole.values = before.values;
    whole.finish = finish;
    whole.z = rows_of(p.z, s.lead - s.reach);
    whole.u = rows_of(p.u);
    whole.blocks = as_int(ceil_div(whole.all_rows, kWholeRows));
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
    set_first(p, s, cut, Work::kPackedFirst, before.packs, plan.first, plan.heads);
  }
  TapProduct& second = plan.second;
  set_blocks(p.second, dtype, false, cut, {Work::kPackedOfQ, Work::kPackedOfK}, before.packs,
             second);
  second.from = rows_of(p.u);
  second.from_rows = s.u_rows;
  second.set_rows(s.batch, s.q_len);
  second.to = finish.qk;
  const bool heads_fit = s.dim <= kTileCols;
  second.ending = heads_fit ? Ending::kFinish : Ending::kStore;
  second.tile_cols = heads_fit ? whole_heads(s.dim) : kTileCols;
  second.finish = finish;
  if (!heads_fit) finish_alone(finish.qk);
  return plan;
}

}  // namespace fovea::layers::cuda
