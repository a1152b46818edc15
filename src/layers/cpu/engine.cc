// The layers' steps on the CPU: views become plain values, rows are dealt to threads.
#include "layers/engine.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/ceil_div.h"
#include "base/refusal.h"
#include "layers/cpu/isa_table.h"
#include "prim/cpu/thread_pool.h"

namespace fovea::layers {
namespace cpu {
namespace {

constexpr int64_t kRowsPerTask = 64;
// Sums over rows are made in this many parts whatever the threads, so that they always agree.
constexpr int64_t kParts = 16;

int64_t aligned(int64_t bytes) { return ceil_div(bytes, 64) * 64; }

// [batch, rows, cols] as one head, [batch, rows, heads, dim] as it is.
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

int64_t row_count(const TensorView& t) { return t.sizes[0] * t.sizes[1]; }

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

class CpuEngine final : public LayerEngine {
 public:
  CpuEngine(const Kernels& kernels, DType dtype, int threads, const EngineNeeds& needs)
      : k_(kernels), dtype_(dtype), threads_(threads), sums_(needs.sums) {
    rotation_.turning = needs.turning;
    rotation_.pairing =
        needs.rope.style == RopeStyle::kHalf ? Pairing::kHalf : Pairing::kInterleaved;
    rotation_.base = needs.rope.base;
    rotation_.positions = needs.turning > 0 ? needs.positions : 0;
    const int64_t real_bytes = dtype == DType::kF64 ? sizeof(double) : sizeof(float);
    table_.resize(static_cast<size_t>(rotation_.positions * needs.turning * real_bytes));
    k_.fill_rotation(rotation_, table_.data());
    rotation_.table = table_.data();
  }

  size_t scratch_bytes() const override {
    return static_cast<size_t>(shared_bytes() + threads_ * worker_bytes());
  }

  void linear(Run& run, const TensorView& x, const TensorView& weight, const TensorView& bias,
              const TensorView& y) const override {
    if (!run.status.ok()) return;
    Gemm g = gemm_rows(x, y);
    g.cols = weight.sizes[0];
    g.depth = weight.sizes[1];
    g.b = {.data = weight.data, .block = 0, .depth = 1, .col = weight.strides[0]};
    g.bias = bias.data;
    multiply(run, &g, 1);
  }

  void linear_dx(Run& run, const TensorView& dy, const TensorView& weight, const TensorView& dx,
                 Write write) const override {
    if (!run.status.ok()) return;
    Gemm g = gemm_rows(dy, dx);
    g.cols = weight.sizes[1];
    g.depth = weight.sizes[0];
    g.b = {.data = weight.data, .block = 0, .depth = weight.strides[0], .col = 1};
    g.add = write == Write::kAdd;
    multiply(run, &g, 1);
  }

  void linear_dw(Run& run, const TensorView& dy, const TensorView& x, const TensorView& dweight,
                 const TensorView& dbias) const override {
    if (!run.status.ok()) return;
    if (dweight.given()) {
      Gemm g;
      g.rows = dweight.sizes[0];
      g.cols = dweight.sizes[1];
      g.blocks = dy.sizes[0];
      g.depth = dy.sizes[1];
      g.a = {.data = dy.data, .batch = 0, .row = 1, .block = dy.strides[0], .depth = dy.strides[1]};
      g.b = {.data = x.data, .block = x.strides[0], .depth = x.strides[1], .col = 1};
      g.c = dweight.data;
      g.c_row = dweight.strides[0];
      multiply(run, &g, 1);
    }
    if (dbias.given()) sum_columns(run, dy, dbias);
  }

  void rotate(Run& run, const TensorView& x, const RowPositions& positions,
              Direction direction) const override {
    if (!run.status.ok() || rotation_.turning == 0) return;
    const RotateRows rotate{head_rows(x), turned(positions, direction)};
    over_rows(row_count(x), [&](int64_t begin, int64_t end, int worker) {
      k_.rotate(rotate, begin, end, worker_scratch(run, worker));
    });
  }

  void normalise(Run& run, const TensorView& x, const Norm& norm,
                 const TensorView& y) const override {
    if (!run.status.ok()) return;
    NormRows rows = norm_rows(norm, x);
    rows.y = head_rows(y);
    over_rows(row_count(x),
              [&](int64_t begin, int64_t end, int) { k_.normalise(rows, begin, end); });
  }

  void normalise_backward(Run& run, const TensorView& dy, const TensorView& x, const Norm& norm,
                          const TensorView& dx, const TensorView& dweight,
                          const TensorView& dbias) const override {
    if (!run.status.ok()) return;
    NormRows rows = norm_rows(norm, x);
    rows.dy = head_rows(dy);
    rows.dx = head_rows(dx);
    const int64_t dim = rows.x.dim;
    const bool wanted = dweight.given() || dbias.given();
    double* const sums = sums_of(run);
    over_parts(row_count(x), [&](int64_t part, int64_t begin, int64_t end) {
      k_.normalise_backward(rows, begin, end, wanted ? sums + part * 2 * dim : nullptr);
    });
    if (!wanted) return;
    join_parts(sums, 2 * dim);
    if (dweight.given()) k_.store_sums(sums, dim, dweight.data, dweight.strides[0]);
    if (dbias.given()) k_.store_sums(sums + dim, dim, dbias.data, dbias.strides[0]);
  }

  void copy(Run& run, const TensorView& from, const TensorView& to) const override {
    copy_or_add(run, from, to, /*add=*/false);
  }
  void add(Run& run, const TensorView& from, const TensorView& to) const override {
    copy_or_add(run, from, to, /*add=*/true);
  }

  void zero(Run& run, const TensorView& to) const override {
    if (!run.status.ok()) return;
    const HeadRows rows = head_rows(to);
    const int64_t size = dtype_bytes(dtype_);
    for (int64_t row = 0; row < row_count(to); ++row) {
      for (int64_t h = 0; h < rows.heads; ++h) {
        auto* const at =
            static_cast<std::byte*>(to.data) + (rows.at(row) + h * rows.head_stride) * size;
        std::fill_n(at, rows.dim * size, std::byte{0});
      }
    }
  }

  void fill_lengths(Run& run, int64_t length, const TensorView& to) const override {
    if (!run.status.ok()) return;
    std::fill_n(static_cast<int32_t*>(to.data), to.sizes[0], static_cast<int32_t>(length));
  }

  // 2^(-8 (h + 1) / n) for n heads, a power of two; other counts take every second slope of the
  // next power for the heads that are left.
  void fill_alibi_slopes(Run& run, const TensorView& to) const override {
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

 private:
  // Scratch of a step: what all workers share (packed operands, or sums over rows by part), then
  // what each has of its own (tiles, or the angles of one row).
  int64_t shared_bytes() const {
    return aligned(std::max<int64_t>(static_cast<int64_t>(k_.shared_scratch),
                                     kParts * sums_ * int64_t{sizeof(double)}));
  }
  int64_t worker_bytes() const {
    return aligned(std::max<int64_t>(static_cast<int64_t>(k_.worker_scratch),
                                     rotation_.turning * int64_t{sizeof(double)}));
  }
  std::byte* worker_scratch(const Run& run, int worker) const {
    return run.scratch + shared_bytes() + worker * worker_bytes();
  }
  static double* sums_of(const Run& run) { return reinterpret_cast<double*>(run.scratch); }

  void multiply(const Run& run, const Gemm* gemms, int64_t count) const {
    k_.gemm(gemms, count, threads_, {run.scratch, run.scratch + shared_bytes(), worker_bytes()});
  }

  void sum_columns(const Run& run, const TensorView& x, const TensorView& to) const {
    const HeadRows rows = head_rows(x);
    double* const sums = sums_of(run);
    over_parts(row_count(x), [&](int64_t part, int64_t begin, int64_t end) {
      std::fill_n(sums + part * rows.dim, rows.dim, 0.0);
      k_.column_sums(rows, begin, end, sums + part * rows.dim);
    });
    join_parts(sums, rows.dim);
    k_.store_sums(sums, rows.dim, to.data, to.strides[0]);
  }

  Rotation turned(const RowPositions& positions, Direction direction) const {
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

  // Rows of x times something into rows of y.
  static Gemm gemm_rows(const TensorView& x, const TensorView& y) {
    Gemm g;
    g.batch = x.sizes[0];
    g.rows = x.sizes[1];
    g.a = {.data = x.data, .batch = x.strides[0], .row = x.strides[1], .block = 0, .depth = 1};
    g.c = y.data;
    g.c_batch = y.strides[0];
    g.c_row = y.strides[1];
    return g;
  }

  template <typename Body>
  void over_rows(int64_t rows, const Body& body) const {
    parallel_for(ceil_div(rows, kRowsPerTask), threads_, [&](int64_t item, int worker) {
      const int64_t begin = item * kRowsPerTask;
      body(begin, std::min(begin + kRowsPerTask, rows), worker);
    });
  }

  template <typename Body>
  void over_parts(int64_t rows, const Body& body) const {
    const int64_t each = ceil_div(rows, kParts);
    parallel_for(kParts, threads_, [&](int64_t part, int) {
      const int64_t begin = std::min(part * each, rows);
      body(part, begin, std::min(begin + each, rows));
    });
  }

  static void join_parts(double* sums, int64_t count) {
    for (int64_t part = 1; part < kParts; ++part) {
      for (int64_t i = 0; i < count; ++i) sums[i] += sums[part * count + i];
    }
  }

  void copy_or_add(Run& run, const TensorView& from, const TensorView& to, bool add) const {
    if (!run.status.ok()) return;
    const CopyRows copy{head_rows(from), head_rows(to), add};
    over_rows(row_count(from), [&](int64_t begin, int64_t end, int) { k_.copy(copy, begin, end); });
  }

  const Kernels& k_;
  const DType dtype_;
  const int threads_;
  const int64_t sums_;
  Rotation rotation_;
  std::vector<std::byte> table_;
};

}  // namespace
}  // namespace cpu

Result<std::unique_ptr<const LayerEngine>> make_engine(const DeviceInfo& device, DType dtype,
                                                       const EngineNeeds& needs) {
  if (device.device.type != DeviceType::kCpu) {
    return unsupported("make_layer", "layers do not run on " + show(device.device),
                       {{"cpu", {"device is cuda, takes cpu"}}});
  }
  const cpu::Kernels* kernels = cpu::kernels_for(device.isa, dtype);
  if (kernels == nullptr) {
    return unsupported("make_layer", "layers do not run on this machine's CPU",
                       {{"cpu", {"isa is \"" + device.isa + "\", this machine does not have it"}}});
  }
  return std::unique_ptr<const LayerEngine>(
      std::make_unique<cpu::CpuEngine>(*kernels, dtype, device.threads, needs));
}

}  // namespace fovea::layers
