// The layers' steps on the CPU: views become plain values, rows are dealt to threads.
#pragma once

#include <algorithm>
#include <vector>

#include "base/ceil_div.h"
#include "layers/cpu/kernels.h"
#include "layers/cpu/rope_table.h"
#include "layers/engine.h"
#include "prim/cpu/thread_pool.h"

namespace fovea::layers::cpu {

// [batch, rows, cols] as one head, [batch, rows, heads, dim] as it is.
HeadRows head_rows(const TensorView& t);
inline int64_t row_count(const TensorView& t) { return t.sizes[0] * t.sizes[1]; }

// The address of an element counted from the first.
inline std::byte* element_at(const TensorView& t, int64_t index) {
  return static_cast<std::byte*>(t.data) + index * dtype_bytes(t.dtype);
}

// `count` products, made by make(n) in turns so that the list needs no memory of its own.
template <typename Make, typename Use>
void in_turns(int64_t count, const Make& make, const Use& use) {
  constexpr int64_t kAtOnce = 16;
  Gemm gemms[kAtOnce];
  for (int64_t begin = 0; begin < count; begin += kAtOnce) {
    const int64_t turn = std::min(kAtOnce, count - begin);
    for (int64_t i = 0; i < turn; ++i) gemms[i] = make(begin + i);
    use(gemms, turn);
  }
}

class CpuEngine final : public LayerEngine {
 public:
  CpuEngine(const Kernels& kernels, DType dtype, int threads, const EngineNeeds& needs);

  size_t scratch_bytes() const override;
  void linear(Run& run, const TensorView& x, const Projection& p,
              const TensorView& y) const override;
  void linear_dx(Run& run, const TensorView& dy, const Projection& p, const TensorView& dx,
                 Write write) const override;
  void linear_dw(Run& run, const TensorView& dy, const TensorView& x,
                 const Projection& dp) const override;
  void head_linear(Run& run, const TensorView& x, const TensorView& weight, Block block,
                   const TensorView& y) const override;
  void sum_heads(Run& run, const TensorView& x, const TensorView& y) const override;
  void rotate(Run& run, std::initializer_list<Turn> turns, Direction direction) const override;
  void normalise(Run& run, const TensorView& x, const Norm& norm,
                 const TensorView& y) const override;
  void normalise_backward(Run& run, const TensorView& dy, const TensorView& x, const Norm& norm,
                          const TensorView& dx, const TensorView& dweight,
                          const TensorView& dbias) const override;
  Result<PrologueNeeds> prologue_needs(const Prologue&, Pass) const override {
    return PrologueNeeds{};
  }
  bool keeps_keys() const override { return false; }
  bool makes_u_again(const Prologue&) const override { return false; }
  void prologue(Run& run, const Prologue& p) const override;
  void prologue_backward(Run& run, Aside& aside, const Prologue& p,
                         const PrologueGradients& g) const override;
  void copy(Run& run, std::initializer_list<Copy> copies) const override;
  void fill_lengths(Run& run, int64_t length, const TensorView& to) const override;
  void fill_alibi_slopes(Run& run, const TensorView& to) const override;

 private:
  // Scratch of a step: what all workers share (packed operands, or sums over rows by part), then
  // what each has of its own (tiles, angles of one row and means over heads, taps of channels).
  int64_t shared_bytes() const;
  int64_t worker_bytes() const;
  std::byte* worker_scratch(const Run& run, int worker) const {
    return run.scratch.data + shared_bytes() + worker * worker_bytes();
  }
  static double* sums_of(const Run& run) { return reinterpret_cast<double*>(run.scratch.data); }

  Rotation turned(const RowPositions& positions, Direction direction) const;
  void multiply(const Run& run, const Gemm* gemms, int64_t count) const;
  template <typename Make>
  void multiply_all(const Run& run, int64_t count, const Make& make) const {
    in_turns(count, make, [&](const Gemm* gemms, int64_t turn) { multiply(run, gemms, turn); });
  }
  void sum_columns(const Run& run, const TensorView& x, const TensorView& to) const;
  // Rows [begin, end), as far as there are so many.
  void copy_rows(const Copy& copy, int64_t begin, int64_t end) const;
  void zero_rows(const TensorView& to, int64_t begin, int64_t end) const;

  // y[t] = sum_j weight[j] x[t + j] + bias, over as many rows as y has.
  void convolve(const Run& run, const Conv& conv, const TensorView& x, const TensorView& y) const;
  // dx[t] (+)= sum_j weight[j]^T dy[t - j], x's row 0 meeting dy's row `first`.
  void convolve_dx(const Run& run, const Conv& conv, const TensorView& dy, int64_t first,
                   const TensorView& dx, Write write) const;
  void convolve_dw(const Run& run, const Conv& dconv, const TensorView& dy,
                   const TensorView& x) const;
  CoupleRows couple_rows(const Prologue& p, Direction direction) const;

  static constexpr int64_t kRowsPerTask = 64;
  // Sums over rows are made in this many parts whatever the threads, so that they always agree.
  static constexpr int64_t kMostParts = 16;

  template <typename Body>
  void over_rows(int64_t rows, const Body& body) const {
    parallel_for(ceil_div(rows, kRowsPerTask), threads_, [&](int64_t item, int worker) {
      const int64_t begin = item * kRowsPerTask;
      body(begin, std::min(begin + kRowsPerTask, rows), worker);
    });
  }

  // Body fills count sums of one part, at the part's place; the sums of all parts end up in part 0.
  template <typename Body>
  double* sum_parts(const Run& run, int64_t rows, int64_t count, const Body& body) const {
    double* const sums = sums_of(run);
    const int64_t each = ceil_div(rows, parts_);
    parallel_for(parts_, threads_, [&](int64_t part, int worker) {
      const int64_t begin = std::min(part * each, rows);
      body(begin, std::min(begin + each, rows), worker, sums + part * count);
    });
    for (int64_t part = 1; part < parts_; ++part) {
      for (int64_t i = 0; i < count; ++i) sums[i] += sums[part * count + i];
    }
    return sums;
  }

  const Kernels& k_;
  const DType dtype_;
  const int threads_;
  const int64_t sums_;
  const int64_t parts_;
  const int64_t mean_bytes_;
  Rotation rotation_;
  RopeTable table_;
};

Result<std::unique_ptr<const LayerEngine>> make_engine(const DeviceInfo& device, DType dtype,
                                                       const EngineNeeds& needs);

}  // namespace fovea::layers::cpu
