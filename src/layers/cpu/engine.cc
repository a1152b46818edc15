// Projections, rotations, norms and small steps of the layers on the CPU.
#include "layers/cpu/engine.h"

#include <cmath>

#include "base/refusal.h"
#include "layers/cpu/isa_table.h"

namespace fovea::layers::cpu {
namespace {

int64_t aligned(int64_t bytes) { return ceil_div(bytes, 64) * 64; }

NormRows norm_rows(const Norm& norm, const TensorView& x) {
  return {.kind = norm.kind == QkNorm::kLayer ? NormKind::kLayer : NormKind::kRms,
          .eps = norm.eps,
          .x = head_rows(x),
          .y = {},
          .weight = norm.weight.data,
          .bias = norm.bias.data,
          .dy = {},
          .dx = {}};
}

// Rows of x times something into rows of y.
Gemm gemm_rows(const TensorView& x, const TensorView& y) {
  Gemm g;
  g.batch = x.sizes[0];
  g.rows = x.sizes[1];
  g.a = {.data = x.data, .batch = x.strides[0], .row = x.strides[1], .block = 0, .depth = 1};
  g.c = y.data;
  g.c_batch = y.strides[0];
  g.c_row = y.strides[1];
  return g;
}

}  // namespace

HeadRows head_rows(const TensorView& t) {
  const bool plain = t.rank == 3;
  return {.data = t.data,
          .rows = t.sizes[1],
          .heads = plain ? 1 : t.sizes[2],
          .dim = plain ? t.sizes[2] : t.sizes[3],
          .batch_stride = t.strides[0],
          .row_stride = t.strides[1],
          .head_stride = plain ? 0 : t.strides[2]};
}

CpuEngine::CpuEngine(const Kernels& kernels, DType dtype, int threads, const EngineNeeds& needs)
    : k_(kernels),
      dtype_(dtype),
      threads_(threads),
      sums_(needs.sums),
      parts_(needs.plain_sums ? 1 : kMostParts),
      mean_bytes_(2 * needs.head_dim * int64_t{sizeof(double)}) {
  rotation_.turning = needs.turning;
  rotation_.pairing = needs.rope.style == RopeStyle::kHalf ? Pairing::kHalf : Pairing::kInterleaved;
  rotation_.base = needs.rope.base;
  rotation_.positions = needs.turning > 0 ? needs.positions : 0;
  table_ = rope_table(rotation_, dtype == DType::kF64 ? sizeof(double) : sizeof(float),
                      k_.fill_rotation);
  rotation_.table = table_->data();
}

size_t CpuEngine::scratch_bytes() const {
  return static_cast<size_t>(shared_bytes() + threads_ * worker_bytes());
}

int64_t CpuEngine::shared_bytes() const {
  return aligned(std::max<int64_t>(static_cast<int64_t>(k_.shared_scratch),
                                   parts_ * sums_ * int64_t{sizeof(double)}));
}

int64_t CpuEngine::worker_bytes() const {
  const int64_t angles_and_means = rotation_.turning * int64_t{sizeof(double)} + mean_bytes_;
  const int64_t taps = 2 * sums_ * int64_t{sizeof(double)};  // a depthwise weight, and one row
  return aligned(std::max({static_cast<int64_t>(k_.worker_scratch), angles_and_means, taps}));
}

void CpuEngine::multiply(const Run& run, const Gemm* gemms, int64_t count) const {
  k_.gemm(gemms, count, threads_,
          {run.scratch.data, run.scratch.data + shared_bytes(), worker_bytes()});
}

void CpuEngine::linear(Run& run, const TensorView& x, const Projection& p,
                       const TensorView& y) const {
  if (!run.status.ok()) return;
  Gemm g = gemm_rows(x, y);
  g.cols = p.weight.sizes[0];
  g.depth = p.weight.sizes[1];
  g.b = {.data = p.weight.data, .block = 0, .depth = 1, .col = p.weight.strides[0]};
  g.bias = p.bias.data;
  g.scale = p.scale;
  multiply(run, &g, 1);
}

void CpuEngine::linear_dx(Run& run, const TensorView& dy, const Projection& p, const TensorView& dx,
                          Write write) const {
  if (!run.status.ok()) return;
  Gemm g = gemm_rows(dy, dx);
  g.cols = p.weight.sizes[1];
  g.depth = p.weight.sizes[0];
  g.b = {.data = p.weight.data, .block = 0, .depth = p.weight.strides[0], .col = 1};
  g.add = write == Write::kAdd;
  g.scale = p.scale;
  multiply(run, &g, 1);
}

void CpuEngine::linear_dw(Run& run, const TensorView& dy, const TensorView& x,
                          const Projection& dp) const {
  if (!run.status.ok()) return;
  if (dp.weight.given()) {
    Gemm g;
    g.rows = dp.weight.sizes[0];
    g.cols = dp.weight.sizes[1];
    g.blocks = dy.sizes[0];
    g.depth = dy.sizes[1];
    g.a = {.data = dy.data, .batch = 0, .row = 1, .block = dy.strides[0], .depth = dy.strides[1]};
    g.b = {.data = x.data, .block = x.strides[0], .depth = x.strides[1], .col = 1};
    g.c = dp.weight.data;
    g.c_row = dp.weight.strides[0];
    g.scale = dp.scale;
    multiply(run, &g, 1);
  }
  if (dp.bias.given()) sum_columns(run, dy, dp.bias);
}

void CpuEngine::sum_columns(const Run& run, const TensorView& x, const TensorView& to) const {
  const HeadRows rows = head_rows(x);
  const double* const sums =
      sum_parts(run, row_count(x), rows.dim, [&](int64_t begin, int64_t end, int, double* part) {
        k_.column_sums(rows, begin, end, part);
      });
  k_.store_sums(sums, rows.dim, to.data, 1);
}

Rotation CpuEngine::turned(const RowPositions& positions, Direction direction) const {
  Rotation rotation = rotation_;
  rotation.sign = direction == Direction::kForward ? 1 : -1;
  rotation.first = positions.first;
  if (positions.ids.given()) {
    rotation.ids = static_cast<const int32_t*>(positions.ids.data);
    rotation.ids_batch = positions.ids.sizes[0] == 1 ? 0 : positions.ids.strides[0];
    rotation.ids_row = positions.ids.strides[1];
  }
  return rotation;
}

void CpuEngine::rotate(Run& run, std::initializer_list<Turn> turns, Direction direction) const {
  if (!run.status.ok() || rotation_.turning == 0) return;
  int64_t most = 0;
  for (const Turn& turn : turns) most = std::max(most, row_count(turn.x));
  over_rows(most, [&](int64_t begin, int64_t end, int worker) {
    for (const auto& [x, positions] : turns) {
      const RotateRows rotate{head_rows(x), turned(positions, direction)};
      k_.rotate(rotate, begin, std::min(end, row_count(x)), worker_scratch(run, worker));
    }
  });
}

void CpuEngine::normalise(Run& run, const TensorView& x, const Norm& norm,
                          const TensorView& y) const {
  if (!run.status.ok()) return;
  NormRows rows = norm_rows(norm, x);
  rows.y = head_rows(y);
  over_rows(row_count(x), [&](int64_t begin, int64_t end, int) { k_.normalise(rows, begin, end); });
}

void CpuEngine::normalise_backward(Run& run, const TensorView& dy, const TensorView& x,
                                   const Norm& norm, const TensorView& dx,
                                   const TensorView& dweight, const TensorView& dbias) const {
  if (!run.status.ok()) return;
  NormRows rows = norm_rows(norm, x);
  rows.dy = head_rows(dy);
  rows.dx = head_rows(dx);
  const int64_t dim = rows.x.dim;
  const double* const sums =
      sum_parts(run, row_count(x), 2 * dim, [&](int64_t begin, int64_t end, int, double* part) {
        k_.normalise_backward(rows, begin, end, part);
      });
  if (dweight.given()) k_.store_sums(sums, dim, dweight.data, 1);
  if (dbias.given()) k_.store_sums(sums + dim, dim, dbias.data, 1);
}

void CpuEngine::copy(Run& run, std::initializer_list<Copy> copies) const {
  if (!run.status.ok()) return;
  int64_t most = 0;
  for (const Copy& copy : copies) most = std::max(most, row_count(copy.to));
  over_rows(most, [&](int64_t begin, int64_t end, int) {
    for (const Copy& copy : copies) copy_rows(copy, begin, end);
  });
}

void CpuEngine::copy_rows(const Copy& copy, int64_t begin, int64_t end) const {
  if (!copy.to.given()) return;
  end = std::min(end, row_count(copy.to));
  if (copy.from.given()) {
    k_.copy({head_rows(copy.from), head_rows(copy.to)}, begin, end);
  } else {
    zero_rows(copy.to, begin, end);
  }
}

void CpuEngine::zero_rows(const TensorView& to, int64_t begin, int64_t end) const {
  const HeadRows rows = head_rows(to);
  const int64_t size = dtype_bytes(dtype_);
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t h = 0; h < rows.heads; ++h) {
      auto* const at =
          static_cast<std::byte*>(to.data) + (rows.at(row) + h * rows.head_stride) * size;
      std::fill_n(at, rows.dim * size, std::byte{0});
    }
  }
}

void CpuEngine::fill_lengths(Run& run, int64_t length, const TensorView& to) const {
  if (!run.status.ok()) return;
  std::fill_n(static_cast<int32_t*>(to.data), to.sizes[0], static_cast<int32_t>(length));
}

// 2^(-8 (h + 1) / n) for n heads, a power of two; other counts take every second slope of the next
// power for the heads that are left.
void CpuEngine::fill_alibi_slopes(Run& run, const TensorView& to) const {
  if (!run.status.ok()) return;
  const int64_t heads = to.sizes[0];
  int64_t power = 1;
  while (power * 2 <= heads) power *= 2;
  for (int64_t h = 0; h < heads; ++h) {
    const double exponent =
        h < power ? -8.0 * static_cast<double>(h + 1) / static_cast<double>(power)
                  : -4.0 * static_cast<double>(2 * (h - power) + 1) / static_cast<double>(power);
    const double slope = std::exp2(exponent);
    if (to.dtype == DType::kF64) {
      static_cast<double*>(to.data)[h] = slope;
    } else {
      static_cast<float*>(to.data)[h] = static_cast<float>(slope);
    }
  }
}

Result<std::unique_ptr<const LayerEngine>> make_engine(const DeviceInfo& device, DType dtype,
                                                       const EngineNeeds& needs) {
  const Kernels* kernels = kernels_for(device.isa, dtype, needs.plain_sums);
  if (kernels == nullptr) {
    return unsupported("make_layer", "layers do not run on this machine's CPU",
                       {{"cpu", {"isa is \"" + device.isa + "\", this machine does not have it"}}});
  }
  return std::unique_ptr<const LayerEngine>(
      std::make_unique<CpuEngine>(*kernels, dtype, device.threads, needs));
}

}  // namespace fovea::layers::cpu
