// The oracle as an engine: the contract in float64, rounded once, into the caller's tensors; or, on
// demand, by the plain formula in the problem's dtype. The backward pass takes out and lse as they
// are given, so that merged parts work.
#include "backend/backend.h"

#include <algorithm>
#include <type_traits>

#include "backend/reference/head_rows.h"
#include "backend/reference/rows_io.h"
#include "backend/reference/threads.h"
#include "base/ceil_div.h"

namespace fovea {
namespace reference {
namespace {

constexpr int64_t kBiasRows = 16;  // rows of dbias made together, to load keys less often

// Scratch of one thread.
template <typename N>
struct ThreadScratch {
  using Real = typename N::Real;

  Real* rows;   // HeadRows
  Real* out;    // [dim_v]
  Real* dout;   // [dim_v]
  Real* dq;     // [dim_qk]
  Real* dk;     // [kv_len, dim_qk]; kBackward, as are those below
  Real* dv;     // [kv_len, dim_v]
  Real* dbias;  // [kBiasRows, kv_len]

  static int64_t reals(const AttentionProblem& p, Pass pass) {
    const auto rows = static_cast<int64_t>(HeadRows<N>::scratch_reals(p, p.kv_len));
    const int64_t forward = rows + 2 * p.dim_v + p.dim_qk;
    const int64_t bias = has(p.features, Feature::kBias) ? kBiasRows : 0;
    const int64_t backward = pass == Pass::kForward ? 0 : p.kv_len * (p.dim_qk + p.dim_v + bias);
    // Which HeadRows asks for.
    constexpr int64_t kAlign = int64_t{sizeof(double)} / int64_t{sizeof(Real)};
    return ceil_div(forward + backward, kAlign) * kAlign;
  }

  ThreadScratch(const AttentionProblem& p, Pass pass, Workspace workspace, int thread) {
    rows = static_cast<Real*>(workspace.data) + thread * reals(p, pass);
    out = rows + HeadRows<N>::scratch_reals(p, p.kv_len);
    dout = out + p.dim_v;
    dq = dout + p.dim_v;
    dk = dq + p.dim_qk;
    dv = dk + p.kv_len * p.dim_qk;
    dbias = dv + p.kv_len * p.dim_v;
  }
};

template <typename N>
class ReferenceKernel : public BoundKernel {
  using Real = typename N::Real;
  using Scratch = ThreadScratch<N>;
  static constexpr bool kExact = std::is_same_v<N, Exact>;

 public:
  ReferenceKernel(const AttentionProblem& problem, int threads)
      : problem_(problem),
        group_(problem.head_kv > 0 ? problem.head_q / problem.head_kv : 0),
        threads_(std::max(1, threads)) {}

  std::string name() const override { return kExact ? "reference/f64" : "reference/plain"; }
  std::string describe() const override {
    return std::string(kExact ? "float64" : "the plain formula in the dtype") +
           ", one query row at a time, " + std::to_string(threads_) + " threads";
  }
  size_t workspace_bytes(Pass pass) const override {
    return static_cast<size_t>(threads_ * Scratch::reals(problem_, pass)) * sizeof(Real);
  }

  Status forward(const ForwardTensors& t, Workspace workspace, Stream) const override {
    for_each_unit(threads_, problem_.batch * problem_.head_kv, [&](int thread, auto u) {
      Scratch scratch(problem_, Pass::kForward, workspace, thread);
      forward_group(t, u / problem_.head_kv, u % problem_.head_kv, scratch);
    });
    return {};
  }

  Status backward(const BackwardTensors& t, Workspace workspace, Stream) const override {
    for_each_unit(threads_, problem_.batch * problem_.head_kv, [&](int thread, auto u) {
      Scratch scratch(problem_, Pass::kBackward, workspace, thread);
      backward_group(t, u / problem_.head_kv, u % problem_.head_kv, scratch);
    });
    if (t.dbias.given()) bias_gradient(t, workspace);
    if (t.dsink.given()) sink_gradient(t, workspace);
    return {};
  }

 private:
  void forward_group(const ForwardTensors& t, int64_t b, int64_t head_kv,
                     const Scratch& scratch) const {
    HeadRows<N> rows(problem_, t, problem_.kv_len, scratch.rows);
    rows.select(b, head_kv);
    for (int64_t h = head_kv * group_; h < (head_kv + 1) * group_; ++h) {
      for (int64_t i = 0; i < rows.sequence().q_len; ++i) {
        const double lse = HeadRows<N>::lse_of(rows.softmax(h, i));
        rows.output(scratch.out);
        store(t.out, query_row(t.out, rows.sequence(), h, i), problem_.dim_v, scratch.out);
        if (t.lse.given()) store(t.lse, lse_element(t.lse, rows.sequence(), h, i), 1, &lse);
      }
    }
  }

  // lse and delta of a row from the tensors of the call; dout is left in the scratch.
  RowStats<Real> given_stats(const BackwardTensors& t, const Sequence& sequence, int64_t h,
                             int64_t i, const Scratch& scratch) const {
    const auto lse = load_one<double>(t.lse, lse_element(t.lse, sequence, h, i));
    auto stats = HeadRows<N>::stats_of(lse);
    load(t.dout, query_row(t.dout, sequence, h, i), problem_.dim_v, scratch.dout);
    load(t.out, query_row(t.out, sequence, h, i), problem_.dim_v, scratch.out);
    stats.delta = delta_of(t, sequence, h, i, problem_.dim_v, scratch.dout, scratch.out);
    return stats;
  }

  void backward_group(const BackwardTensors& t, int64_t b, int64_t head_kv,
                      const Scratch& scratch) const {
    const int64_t dim_qk = problem_.dim_qk, dim_v = problem_.dim_v;
    HeadRows<N> rows(problem_, t, problem_.kv_len, scratch.rows);
    rows.select(b, head_kv);
    const Sequence& sequence = rows.sequence();
    // Dense tensors have kv_len rows even where the key length is shorter: those gradients are 0.
    const int64_t written = problem_.layout == Layout::kPacked ? sequence.kv_len : problem_.kv_len;
    std::fill_n(scratch.dk, written * dim_qk, Real{0});
    std::fill_n(scratch.dv, written * dim_v, Real{0});
    for (int64_t h = head_kv * group_; h < (head_kv + 1) * group_; ++h) {
      for (int64_t i = 0; i < sequence.q_len; ++i) {
        const RowStats<Real> stats = given_stats(t, sequence, h, i, scratch);
        rows.softmax(h, i, stats);
        rows.differentiate(scratch.dout, stats.delta);
        rows.dq(scratch.dq);
        store(t.dq, query_row(t.dq, sequence, h, i), dim_qk, scratch.dq);
        rows.add_dk(scratch.dk);
        rows.add_dv(scratch.dout, scratch.dv);
      }
    }
    for (int64_t j = 0; j < written; ++j) {
      store(t.dk, key_row(t.dk, sequence, head_kv, j), dim_qk, scratch.dk + j * dim_qk);
      store(t.dv, key_row(t.dv, sequence, head_kv, j), dim_v, scratch.dv + j * dim_v);
    }
  }

  // dbias = ds, summed over the dimensions that the bias is broadcast over. A unit owns some rows
  // of dbias and visits every (batch, head, query) that they reach, so that no thread waits for
  // another and no score matrix exists.
  void bias_gradient(const BackwardTensors& t, Workspace workspace) const {
    const auto& sizes = t.dbias.sizes;
    const int64_t blocks = (sizes[2] + kBiasRows - 1) / kBiasRows;
    for_each_unit(threads_, sizes[0] * sizes[1] * blocks, [&](int thread, int64_t u) {
      Scratch scratch(problem_, Pass::kBackward, workspace, thread);
      const int64_t first = u % blocks * kBiasRows;
      bias_rows(t, u / blocks / sizes[1], u / blocks % sizes[1], first,
                std::min(kBiasRows, sizes[2] - first), scratch);
    });
  }

  void bias_rows(const BackwardTensors& t, int64_t bias_b, int64_t bias_h, int64_t first,
                 int64_t count, const Scratch& scratch) const {
    const auto& sizes = t.dbias.sizes;
    const int64_t kv_len = problem_.kv_len;
    std::fill_n(scratch.dbias, count * kv_len, Real{0});
    HeadRows<N> rows(problem_, t, kv_len, scratch.rows);
    const int64_t b_end = sizes[0] == 1 ? problem_.batch : bias_b + 1;
    const int64_t h_end = sizes[1] == 1 ? problem_.head_q : bias_h + 1;
    for (int64_t b = bias_b; b < b_end; ++b) {
      int64_t loaded = -1;
      for (int64_t h = bias_h; h < h_end; ++h) {
        if (h / group_ != loaded) rows.select(b, loaded = h / group_);
        const int64_t q_len = rows.sequence().q_len;
        const bool one = sizes[2] == 1;
        for (int64_t i = first; i < (one ? q_len : std::min(first + count, q_len)); ++i) {
          const RowStats<Real> stats = given_stats(t, rows.sequence(), h, i, scratch);
          rows.softmax(h, i, stats);
          rows.differentiate(scratch.dout, stats.delta);
          rows.add_dbias(scratch.dbias + (one ? 0 : i - first) * kv_len);
        }
      }
    }
    const auto& strides = t.dbias.strides;
    const int64_t base = bias_b * strides[0] + bias_h * strides[1];
    for (int64_t row = 0; row < count; ++row) {
      for (int64_t j = 0; j < kv_len; ++j) {
        store(t.dbias, base + (first + row) * strides[2] + j * strides[3], 1,
              scratch.dbias + row * kv_len + j);
      }
    }
  }

  // dsink_h = -sum over batch and queries of p_sink * delta.
  void sink_gradient(const BackwardTensors& t, Workspace workspace) const {
    Scratch scratch(problem_, Pass::kBackward, workspace, 0);
    HeadRows<N> rows(problem_, t, problem_.kv_len, scratch.rows);
    for (int64_t h = 0; h < problem_.head_q; ++h) {
      Real sum = 0;
      for (int64_t b = 0; b < problem_.batch; ++b) {
        const Sequence sequence = sequence_at(problem_, t, b);
        for (int64_t i = 0; i < sequence.q_len; ++i) {
          const RowStats<Real> stats = given_stats(t, sequence, h, i, scratch);
          const Real weight = rows.sink_weight(h, stats);
          if (weight != 0) sum -= weight * stats.delta;
        }
      }
      store(t.dsink, h * t.dsink.strides[0], 1, &sum);
    }
  }

  AttentionProblem problem_;
  int64_t group_;  // query heads per KV head
  int threads_;
};

class ReferenceBackend : public Backend {
 public:
  const char* name() const override { return "reference"; }

  std::vector<std::string> refusals(const AttentionProblem& problem,
                                    const DeviceInfo& device) const override {
    std::vector<std::string> reasons;
    if (device.device.type != DeviceType::kCpu) reasons.push_back("device is cuda, takes cpu");
    if (problem.dtype == DType::kBool || problem.dtype == DType::kI32) {
      reasons.push_back(std::string("dtype is ") + dtype_name(problem.dtype) +
                        ", takes f64, f32, f16, bf16");
    }
    // The arithmetic of workspace_bytes, in a type that cannot overflow.
    const double rows = static_cast<double>(problem.kv_len) + 1;
    const double width =
        static_cast<double>(problem.dim_qk) + static_cast<double>(problem.dim_v) + kBiasRows;
    if (4 * rows * width * sizeof(double) * std::max(1, device.threads) > 0x1p60) {
      reasons.push_back("kv_len is " + std::to_string(problem.kv_len) +
                        ", takes what fits in 2^60 bytes of workspace");
    }
    return reasons;
  }

  std::unique_ptr<BoundKernel> bind(const AttentionProblem& problem,
                                    const DeviceInfo& device) const override {
    const int64_t units = std::max<int64_t>(1, problem.batch * problem.head_kv);
    const auto threads = static_cast<int>(std::min<int64_t>(device.threads, units));
    return with_numbers(device.arithmetic, problem, [&](auto n) -> std::unique_ptr<BoundKernel> {
      return std::make_unique<ReferenceKernel<decltype(n)>>(problem, threads);
    });
  }
};

}  // namespace
}  // namespace reference

const Backend& reference_backend() {
  static const reference::ReferenceBackend backend;
  return backend;
}

}  // namespace fovea
