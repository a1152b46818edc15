// CCGQA's prologue on the CPU: convolutions as products of matrices, then one pass over the tokens.
#include "layers/cpu/engine.h"
#include "layers/memory.h"

namespace fovea::layers::cpu {
namespace {

// The channels of one block of a convolution.
TensorView channels_of(const TensorView& t, const ConvBlock& block) {
  return columns(t, block.first, block.channels);
}

int64_t groups_of(const ConvBlock& block) { return block.channels / block.group; }

// A convolution's g-th group of channels as a product over taps and channels; kBackward: of the
// gradient, from the tokens after.
Gemm product_of_taps(const ConvBlock& block, int64_t taps, int64_t g, const TensorView& from,
                     const TensorView& to, Direction direction) {
  const bool forward = direction == Direction::kForward;
  const int64_t first = g * block.group, out = block.weight.strides[0],
                in = block.weight.strides[1];
  Gemm m;
  m.batch = to.sizes[0];
  m.rows = to.sizes[1];
  m.cols = m.depth = block.group;
  m.blocks = taps;
  m.a = {element_at(from, first), from.strides[0], from.strides[1],
         forward ? from.strides[1] : -from.strides[1], 1};
  m.b = {element_at(block.weight, first * out), 1, forward ? in : out, forward ? out : in};
  m.c = element_at(to, first);
  m.c_batch = to.strides[0];
  m.c_row = to.strides[1];
  return m;
}

}  // namespace

void CpuEngine::convolve(const Run& run, const Conv& conv, const TensorView& x,
                         const TensorView& y) const {
  for (int n = 0; n < conv.blocks; ++n) {
    const ConvBlock& block = conv.block[static_cast<size_t>(n)];
    const TensorView from = channels_of(x, block), to = channels_of(y, block);
    if (block.group == 1) {
      DepthwiseRows rows{head_rows(from),   head_rows(to),   conv.taps, x.strides[1],
                         block.weight.data, block.bias.data, false};
      rows.x.rows = rows.y.rows;
      over_rows(row_count(to), [&](int64_t begin, int64_t end, int worker) {
        k_.depthwise(rows, begin, end, worker_scratch(run, worker));
      });
      continue;
    }
    const auto make = [&](int64_t g) {
      Gemm m = product_of_taps(block, conv.taps, g, from, to, Direction::kForward);
      m.bias = block.bias.given() ? element_at(block.bias, g * block.group) : nullptr;
      return m;
    };
    multiply_all(run, groups_of(block), make);
  }
}

void CpuEngine::convolve_dx(const Run& run, const Conv& conv, const TensorView& dy, int64_t first,
                            const TensorView& dx, Write write) const {
  for (int n = 0; n < conv.blocks; ++n) {
    const ConvBlock& block = conv.block[static_cast<size_t>(n)];
    const TensorView from = rows(channels_of(dy, block), first, dx.sizes[1]);
    const TensorView to = channels_of(dx, block);
    const bool add = write == Write::kAdd;
    if (block.group == 1) {
      const DepthwiseRows back{head_rows(from),   head_rows(to), conv.taps, -dy.strides[1],
                               block.weight.data, nullptr,       add};
      over_rows(row_count(to), [&](int64_t begin, int64_t end, int worker) {
        k_.depthwise(back, begin, end, worker_scratch(run, worker));
      });
      continue;
    }
    const auto make = [&](int64_t g) {
      Gemm m = product_of_taps(block, conv.taps, g, from, to, Direction::kBackward);
      m.add = add;
      return m;
    };
    multiply_all(run, groups_of(block), make);
  }
}

void CpuEngine::convolve_dw(const Run& run, const Conv& dconv, const TensorView& dy,
                            const TensorView& x) const {
  for (int n = 0; n < dconv.blocks; ++n) {
    const ConvBlock& block = dconv.block[static_cast<size_t>(n)];
    const TensorView from = channels_of(x, block), to = channels_of(dy, block);
    if (block.bias.given()) sum_columns(run, to, block.bias);
    if (!block.weight.given()) continue;
    if (block.group == 1) {
      DepthwiseRows rows{head_rows(from), head_rows(to), dconv.taps, x.strides[1],
                         nullptr,         nullptr,       false};
      rows.x.rows = rows.y.rows;
      const int64_t count = block.channels * dconv.taps;
      const double* const sums =
          sum_parts(run, row_count(to), count, [&](int64_t begin, int64_t end, int, double* part) {
            k_.depthwise_sums(rows, begin, end, part);
          });
      for (int64_t tap = 0; tap < dconv.taps; ++tap) {
        k_.store_sums(sums + tap * block.channels, block.channels, element_at(block.weight, tap),
                      dconv.taps);
      }
      continue;
    }
    const auto make = [&](int64_t item) {
      const int64_t g = item / dconv.taps, tap = item % dconv.taps;
      Gemm m;
      m.rows = m.cols = block.group;
      m.blocks = to.sizes[0];
      m.depth = to.sizes[1];
      m.a = {element_at(to, g * block.group), 0, 1, to.strides[0], to.strides[1]};
      m.b = {element_at(from, g * block.group + tap * from.strides[1]), from.strides[0],
             from.strides[1], 1};
      m.c = element_at(block.weight, g * block.group * block.weight.strides[0] + tap);
      m.c_row = block.weight.strides[0];
      m.c_col = block.weight.strides[1];
      return m;
    };
    multiply_all(run, groups_of(block) * dconv.taps, make);
  }
}

CoupleRows CpuEngine::couple_rows(const Prologue& p, Direction direction) const {
  const HeadMix& mix = p.mix;
  const TensorView before = columns(rows(p.z, p.lead, p.qk.sizes[1]), 0, mix.qk_width());
  CoupleRows a;
  a.heads = mix.heads;
  a.heads_kv = mix.heads_kv;
  a.dim = mix.dim;
  // With one query head to a KV head both couplings are the same.
  const bool all = mix.coupling == CcgqaCoupling::kAllHeads && mix.heads != mix.heads_kv;
  a.coupling = !mix.couple ? Coupling::kNone : all ? Coupling::kAllHeads : Coupling::kGroup;
  a.convolve = p.convolve;
  a.norm = mix.norm;
  a.length = mix.length;
  a.query_length = mix.query_length;
  a.kind = mix.kind == KeyTemperature::kShared    ? Temperature::kShared
           : mix.kind == KeyTemperature::kPerHead ? Temperature::kPerHead
                                                  : Temperature::kPerHeadExp;
  a.temperature = mix.temperature.data;
  a.rotation = turned(mix.positions, direction);
  a.before = head_rows(before);
  a.convolved = p.convolve ? head_rows(p.mixed) : a.before;
  a.mixed = head_rows(p.mixed);
  a.qk = head_rows(p.qk);
  return a;
}

void CpuEngine::prologue(Run& run, const Prologue& p) const {
  if (!run.status.ok()) return;
  const int64_t qk = p.mix.qk_width(), q_len = p.qk.sizes[1], v = p.mix.v_width();
  if (p.convolve) {
    const int64_t reach = p.first.taps + p.second.taps - 2;
    convolve(run, p.first, columns(rows(p.z, p.lead - reach, reach + q_len), 0, qk), p.u);
    convolve(run, p.second, p.u, p.mixed);
  }
  const CoupleRows couple = couple_rows(p, Direction::kForward);
  const int64_t now = p.mix.value_shift ? v / 2 : v;
  const Copy of_now{columns(rows(p.z, p.lead, q_len), qk, now), columns(p.v, 0, now)};
  Copy of_before;
  if (p.mix.value_shift) {
    of_before = {columns(rows(p.z, p.lead - 1, q_len), qk + now, v - now),
                 columns(p.v, now, v - now)};
  }
  over_rows(row_count(p.qk), [&](int64_t begin, int64_t end, int worker) {
    k_.couple(couple, begin, end, worker_scratch(run, worker));
    copy_rows(of_now, begin, end);
    copy_rows(of_before, begin, end);
  });
}

void CpuEngine::prologue_backward(Run& run, Aside&, const Prologue& p,
                                  const PrologueGradients& g) const {
  if (!run.status.ok()) return;
  const int64_t qk = p.mix.qk_width(), q_len = p.qk.sizes[1], v = p.mix.v_width();
  const int64_t margin = p.second.taps - 1;
  CoupleRows couple = couple_rows(p, Direction::kBackward);
  couple.dqk = head_rows(g.dqk);
  couple.dmixed = head_rows(rows(g.dmixed, margin, q_len));
  couple.dbefore = head_rows(columns(g.dz, 0, qk));
  double* const sums =
      sum_parts(run, row_count(p.qk), p.mix.heads_kv,
                [&](int64_t begin, int64_t end, int worker, double* part) {
                  k_.couple_backward(couple, begin, end, worker_scratch(run, worker), part);
                });
  if (g.dtemperature.given()) {
    if (p.mix.kind == KeyTemperature::kShared) {
      for (int64_t h = 1; h < p.mix.heads_kv; ++h) sums[0] += sums[h];
    }
    k_.store_sums(sums, g.dtemperature.sizes[0], g.dtemperature.data, 1);
  }

  const int64_t now = p.mix.value_shift ? v / 2 : v;
  Copy of_next, of_last;
  if (p.mix.value_shift && q_len > 0) {  // a token's second half is the value of the one before
    const TensorView from = columns(g.dv, now, v - now), to = columns(g.dz, qk + now, v - now);
    of_next = {rows(from, 1, q_len - 1), rows(to, 0, q_len - 1)};
    of_last = {{}, rows(to, q_len - 1, 1)};
  }
  copy(run, {{columns(g.dv, 0, now), columns(g.dz, qk, now)}, of_next, of_last});
  if (!p.convolve) return;

  // Beyond the sequence's ends there is no gradient to come from.
  const int64_t reach = p.first.taps - 1 + margin, u_rows = margin + q_len;
  copy(run, {{{}, rows(g.dmixed, 0, margin)}, {{}, rows(g.dmixed, margin + q_len, margin)}});
  convolve_dx(run, p.second, g.dmixed, margin, rows(g.du, 0, u_rows), Write::kSet);
  copy(run, {{{}, rows(g.du, u_rows, p.first.taps - 1)}});
  convolve_dx(run, p.first, g.du, reach, columns(g.dz, 0, qk), Write::kAdd);
  convolve_dw(run, g.second, rows(g.dmixed, margin, q_len), p.u);
  convolve_dw(run, g.first, rows(g.du, 0, u_rows),
              columns(rows(p.z, p.lead - reach, reach + q_len), 0, qk));
}

}  // namespace fovea::layers::cpu
