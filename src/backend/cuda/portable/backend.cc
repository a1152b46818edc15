// Which problems the portable engine takes, which kernel it gives them, and the two passes.
#include "backend/cuda/portable/backend.h"

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <tuple>

#include "backend/cuda/common/alignment.h"
#include "backend/cuda/common/call.h"
#include "backend/cuda/common/error.h"
#include "backend/cuda/portable/plan.h"
#include "backend/sequence.h"
#include "base/refusal.h"

namespace fovea::cuda {
namespace {

constexpr int kOldestSm = 80;
constexpr int64_t kMaxDim = 256;
constexpr int64_t kMaxLength = int64_t{1} << 30;

// Whether what lies in tensors is fewer than 2^31 values from their first.
bool places_are_ints(std::initializer_list<const TensorView*> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const TensorView* t) {
    int64_t last = 0;
    for (size_t d = 0; d < static_cast<size_t>(t->rank); ++d) {
      last += (t->sizes[d] - 1) * std::abs(t->strides[d]);
    }
    return last < kDividable;
  });
}

class PortableKernel : public BoundKernel {
 public:
  PortableKernel(const AttentionProblem& problem, const DeviceInfo& device)
      : p_(problem),
        device_(device.device.index),
        forward_(*find_forward(problem, device.gpu)),
        backward_(*find_backward(problem, device.gpu)),
        cut_(cut_forward(problem, forward_.config, device.gpu)),
        backward_cut_(cut_backward(problem, backward_.one_pass, device.gpu)),
        planned_forward_(plan_forward(problem, forward_.config, cut_, device.gpu)),
        planned_backward_(plan_backward(problem, backward_cut_, device.gpu)) {}

  std::string name() const override {
    const ForwardConfig& c = forward_.config;
    const char* const numbers = c.products == Products::kTf32 ? "tf32" : dtype_name(p_.dtype);
    return std::string("portable/") + numbers + "/d" + std::to_string(c.dim_qk) +
           (c.dim_v == c.dim_qk ? "" : "v" + std::to_string(c.dim_v)) +
           (c.terms == Terms::kAny        ? "/terms"
            : c.terms == Terms::kComputed ? "/computed-terms"
            : c.terms == Terms::kBias     ? "/bias"
            : c.terms == Terms::kMask     ? "/mask"
            : c.width == Width::kPairs    ? "/pairs"
            : c.width == Width::kQuads    ? "/quads"
            : c.width == Width::kCrowded  ? "/crowded"
                                          : "");
  }

  std::string describe() const override {
    const ForwardConfig& c = forward_.config;
    const auto text = [](int64_t n) { return std::to_string(n); };
    const std::string products = c.products == Products::kHalf   ? "mma.sync"
                                 : c.products == Products::kTf32 ? "mma.sync, f32 rounded to tf32"
                                                                 : "exact multiply-adds";
    return products + "; forward: tiles " + text(c.tile_q()) + " x " + text(c.tile_kv) + ", " +
           text(cut_.tiles) + " tiles of rows a KV head, keys in " + text(cut_.parts) +
           (cut_.parts == 1 ? " part" : " parts") + "; backward: " +
           (backward_cut_.one_launch ? "one launch of blocks of keys and blocks of rows"
            : backward_cut_.one_pass
                ? "one pass over tiles of " + text(backward_.one_pass.key_tile()) +
                      " keys, their rows in " + text(backward_cut_.row_parts) +
                      (backward_cut_.row_parts == 1 ? " part" : " parts")
                : "dk, dv by tiles of " + text(backward_.config.key_tile()) +
                      " keys, dq by tiles of " + text(backward_.config.row_tile()) + " rows");
  }

  size_t workspace_bytes(Pass pass) const override {
    if (pass == Pass::kBackward) {
      return static_cast<size_t>((padded_stats() + sum_floats()) * int64_t{sizeof(float)});
    }
    if (cut_.parts == 1) return 0;
    return static_cast<size_t>(Parts::bytes(cut_.parts, partial_rows(), p_.dim_v));
  }

  Status forward(const ForwardTensors& t, Workspace workspace, Stream stream) const override {
    const int64_t blocks = cut_.tiles * p_.batch * p_.head_kv;
    if (blocks == 0) return {};
    ForwardArguments a = planned_forward_;
    a.p = problem_of(p_, t);
    a.q = rows_of(t.q);
    a.k = rows_of(t.k);
    a.v = rows_of(t.v);
    a.out = rows_of(t.out);
    a.lse = scalars_of(t.lse);
    a.vector_qk = takes_vectors(t.q) && takes_vectors(t.k);
    a.vector_v = takes_vectors(t.v);
    a.vector_out = takes_vectors(t.out);
    a.whole_rows = a.vector_qk && a.vector_v && p_.dim_qk == forward_.config.dim_qk &&
                   p_.dim_v == forward_.config.dim_v;
    if (cut_.parts > 1) {
      a.parts = Parts::in(workspace.data, cut_.parts, partial_rows());
    }
    const CurrentDevice current(device_);
    if (Status s = to_status(current.error(), "forward: choosing the device"); !s.ok()) return s;
    const auto queue = static_cast<cudaStream_t>(stream.handle);
    if (Status s = to_status(forward_.launch(a, blocks, queue), "forward: launching the kernel");
        !s.ok() || cut_.parts == 1) {
      return s;
    }
    return to_status(forward_.merge({a.p, a.batch, a.parts, a.out, a.lse}, queue),
                     "forward: launching the merge");
  }

  Status backward(const BackwardTensors& t, Workspace workspace, Stream stream) const override {
    BackwardArguments a = planned_backward_;
    a.p = problem_of(p_, t);
    a.q = rows_of(t.q);
    a.k = rows_of(t.k);
    a.v = rows_of(t.v);
    a.out = rows_of(t.out);
    a.dout = rows_of(t.dout);
    a.dq = rows_of(t.dq);
    a.dk = rows_of(t.dk);
    a.dv = rows_of(t.dv);
    a.lse = scalars_of(t.lse);
    a.dlse = scalars_of(t.dlse);
    a.vector_q = takes_vectors(t.q);
    a.vector_k = takes_vectors(t.k);
    a.vector_v = takes_vectors(t.v);
    a.vector_out = takes_vectors(t.out);
    a.vector_dout = takes_vectors(t.dout);
    a.vector_dq = takes_vectors(t.dq);
    a.vector_dk = takes_vectors(t.dk);
    a.vector_dv = takes_vectors(t.dv);
    a.delta = static_cast<float*>(workspace.data);
    a.lse2 = a.delta + stat_rows();
    a.marks_hidden_rows = backward_.config.terms == Terms::kMask;
    a.one_launch &= !t.dlse.given() &&
                    places_are_ints({&t.q, &t.k, &t.v, &t.out, &t.dout, &t.lse}) && a.vector_q &&
                    a.vector_k && a.vector_v && a.vector_out && a.vector_dout && a.vector_dq &&
                    a.vector_dk && a.vector_dv;
    if (backward_cut_.one_pass) {
      a.dq_sum = a.delta + padded_stats();
      a.dk_sum = a.dq_sum + backward_cut_.query_sum_rows * backward_.config.dim_qk;
      a.dv_sum = a.dk_sum + backward_cut_.key_sum_rows * backward_.config.dim_qk;
      a.sum_floats = sum_floats();
    }
    if (t.dbias.given()) {
      const Broadcast strides = broadcast_of(t.dbias);
      a.dbias = t.dbias.data;
      a.dbias_batch = strides.batch;
      a.dbias_head = strides.head;
      a.dbias_q = strides.q;
      a.dbias_batches = static_cast<int>(t.dbias.sizes[0]);
      a.dbias_heads = static_cast<int>(t.dbias.sizes[1]);
      a.dbias_rows = static_cast<int>(t.dbias.sizes[2]);
      a.dbias_is_f32 = t.dbias.dtype == DType::kF32;
      a.dbias_in_pass = stores_dbias(a.p, t);
      a.dbias_shift =
          static_cast<const char*>(t.dbias.data) - static_cast<const char*>(t.bias.data);
    }
    if (t.dsink.given()) {
      a.dsink = static_cast<float*>(t.dsink.data);
      a.dsink_head = t.dsink.strides[0];
    }
    const CurrentDevice current(device_);
    if (Status s = to_status(current.error(), "backward: choosing the device"); !s.ok()) return s;
    return to_status(backward_.launch(a, static_cast<cudaStream_t>(stream.handle)),
                     "backward: launching the kernels");
  }

 private:
  // Whether the pass that reads the bias may store its gradient too.
  bool stores_dbias(const Problem& p, const BackwardTensors& t) const {
    const Broadcast from = p.bias, to = broadcast_of(t.dbias);
    const bool whole = t.dbias.sizes[0] == p_.batch && t.dbias.sizes[1] == p_.head_q &&
                       t.dbias.sizes[2] == p_.q_len;
    return backward_.config.terms == Terms::kBias && p.term_runs && t.dbias.dtype == p_.dtype &&
           rows_begin_on(t.dbias, 8) && whole && from.batch == to.batch && from.head == to.head &&
           from.q == to.q && p.left < 0 && p.right < 0 && !p.lengths_are_read();
  }

  int64_t partial_rows() const { return p_.batch * p_.head_q * p_.q_len; }
  int64_t stat_rows() const {
    return p_.head_q * (p_.layout == Layout::kPacked ? p_.total_q : p_.batch * p_.q_len);
  }
  // delta and lse2, in whole 16 bytes: sums follow.
  int64_t padded_stats() const { return ceil_div(2 * stat_rows(), 4) * 4; }
  int64_t sum_floats() const {
    const BackwardConfig& c = backward_.config;
    return backward_cut_.query_sum_rows * c.dim_qk +
           backward_cut_.key_sum_rows * (c.dim_qk + c.dim_v);
  }

  const AttentionProblem p_;
  const int device_;
  const ForwardKernel& forward_;
  const BackwardKernel& backward_;
  const ForwardCut cut_;
  const BackwardCut backward_cut_;
  const ForwardArguments planned_forward_;
  const BackwardArguments planned_backward_;
};

class PortableBackend : public Backend {
 public:
  const char* name() const override { return "portable"; }

  std::vector<std::string> refusals(const AttentionProblem& p,
                                    const DeviceInfo& device) const override {
    std::vector<std::string> reasons;
    if (device.device.type != DeviceType::kCuda) return {"device is cpu, takes cuda"};
    if (device.gpu.sm < kOldestSm) {
      reasons.push_back("compute capability is " + std::to_string(device.gpu.sm / 10) + "." +
                        std::to_string(device.gpu.sm % 10) + ", takes 8.0 and later");
    }
    if (p.dtype != DType::kF32 && p.dtype != DType::kF16 && p.dtype != DType::kBf16) {
      reasons.push_back(std::string("dtype is ") + dtype_name(p.dtype) + ", takes f32, f16, bf16");
    }
    for (const auto& [name, value, most] :
         {std::tuple{"dim_qk", p.dim_qk, kMaxDim}, std::tuple{"dim_v", p.dim_v, kMaxDim},
          std::tuple{"q_len", p.q_len, kMaxLength}, std::tuple{"kv_len", p.kv_len, kMaxLength},
          std::tuple{"head_q * q_len", p.head_q * p.q_len, kMaxLength}}) {
      if (value > most) {
        reasons.push_back(std::string(name) + " is " + std::to_string(value) + ", takes up to " +
                          std::to_string(most));
      }
    }
    if (reasons.empty() && find_forward(p, device.gpu) == nullptr) {
      reasons.emplace_back("no instance holds these head dims");
    }
    return reasons;
  }

  std::unique_ptr<BoundKernel> bind(const AttentionProblem& p,
                                    const DeviceInfo& device) const override {
    return std::make_unique<PortableKernel>(p, device);
  }
};

}  // namespace

const Backend& portable_backend() {
  static const PortableBackend backend;
  return backend;
}

}  // namespace fovea::cuda
