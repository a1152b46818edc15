// The CPU engine: which problems it takes, how a call is cut into tasks, and the two passes.
#include "backend/backend.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "backend/cpu/call.h"
#include "backend/cpu/cut.h"
#include "backend/cpu/isa.h"
#include "backend/cpu/isa_table.h"
#include "base/ceil_div.h"
#include "prim/cpu/thread_pool.h"

namespace fovea {
namespace cpu {
namespace {

constexpr int64_t kAlign = kWorkspaceAlignment;

// Queries, or keys, that a thread takes at once in steps that only read and write their rows.
constexpr int64_t kRowsOfStep = 256;

// What several tasks make of the same rows, `count` parts of each, until it is joined.
struct Partials {
  std::byte* data;
  int64_t count;
  int64_t bytes;  // of a part

  float* at(int64_t rows, int64_t part) const {
    return reinterpret_cast<float*>(data + (rows * count + part) * bytes);
  }
  int64_t stride() const { return bytes / int64_t{sizeof(float)}; }
};

// Sequences of every batch member, resolved once a call without allocating: in the workspace.
Sequence* write_sequences(const AttentionProblem& p, const AttentionInputs& t, void* at) {
  auto* const sequences = static_cast<Sequence*>(at);
  for (int64_t b = 0; b < p.batch; ++b) sequences[b] = sequence_at(p, t, b);
  return sequences;
}

class CpuKernel : public BoundKernel {
 public:
  CpuKernel(const AttentionProblem& problem, const DeviceInfo& device, const Kernels& kernels)
      : p_(problem),
        isa_(device.isa),
        threads_(device.threads),
        k_(kernels),
        forward_(cut_forward(problem, kernels.sizes, device.threads)),
        backward_(cut_backward(problem, kernels.sizes, device.threads)) {
    const Arguments a = arguments_of(p_);
    forward_scratch_ = aligned(k_.forward_scratch(a, forward_.rows));
    backward_scratch_ =
        std::max(aligned(k_.backward_scratch(a, p_.q_len, backward_.keys, backward_.heads)),
                 has(p_.features, Feature::kBias) ? aligned(k_.bias_gradient_scratch(a)) : 0);
  }

  std::string name() const override { return "cpu/" + isa_ + "/" + dtype_name(p_.dtype); }

  std::string describe() const override {
    const KernelSizes& s = k_.sizes;
    const auto text = [](int64_t n) { return std::to_string(n); };
    const auto parts = [&](int64_t n) { return text(n) + (n == 1 ? " part" : " parts"); };
    std::string out = text(threads_) + " threads, products in " + k_.matrix + "; forward: ";
    if (group() * p_.q_len <= s.stream_rows) {
      out += "keys streamed unpacked";
    } else {
      out += "tiles " + text(s.tile_q) + " x " + text(s.tile_kv) + ", " + text(forward_.chunks) +
             " chunks of " + text(forward_.rows) + " rows a KV head";
    }
    out += ", keys in " + parts(forward_.parts);
    out += "; backward: tiles " + text(s.backward_tile_q) + " x " + text(s.backward_tile_kv) +
           ", query heads of a KV head in " + parts(backward_.head_parts) + ", keys in " +
           parts(backward_.key_parts);
    return out;
  }

  size_t workspace_bytes(Pass pass) const override {
    int64_t bytes = sequence_bytes();
    if (pass == Pass::kForward) {
      bytes += threads_ * forward_scratch_;
      if (forward_.parts > 1) bytes += heads() * forward_.chunks * forward_.parts * partial_bytes();
    } else {
      bytes += threads_ * backward_scratch_ + delta_bytes();
      if (backward_.key_parts > 1) bytes += heads() * backward_.key_parts * dq_partial_bytes();
      if (backward_.head_parts > 1) bytes += heads() * backward_.head_parts * dkv_partial_bytes();
    }
    return static_cast<size_t>(bytes);
  }

  Status forward(const ForwardTensors& t, Workspace workspace, Stream) const override {
    const Arguments a = arguments_of(p_, t);
    auto* at = static_cast<std::byte*>(workspace.data);
    const Sequence* sequences = write_sequences(p_, t, at);
    at += sequence_bytes();
    std::byte* const scratch = at;
    at += threads_ * forward_scratch_;

    const ForwardCut& cut = forward_;
    const Partials partials{at, cut.parts, partial_bytes()};
    const int64_t items = heads() * cut.chunks;
    const auto task_at = [&](int64_t item, int64_t part) {
      ForwardTask task;
      // The last rows of all heads first: under a causal mask they take longest, and what is left
      // for the end is short.
      const int64_t head = item % heads(), chunk = cut.chunks - 1 - item / heads();
      task.head = {sequences[head / p_.head_kv], head / p_.head_kv, head % p_.head_kv};
      const Sequence& s = task.head.sequence;
      task.row_begin = chunk * cut.rows;
      task.row_end = std::min(task.row_begin + cut.rows, a.group * s.q_len);
      task.key_begin = std::min(part * cut.keys, s.kv_len);
      task.key_end = std::min(task.key_begin + cut.keys, s.kv_len);
      return task;
    };
    parallel_for(items * cut.parts, threads_, [&](int64_t index, int worker) {
      const int64_t item = index / cut.parts, part = index % cut.parts;
      ForwardTask task = task_at(item, part);
      if (task.row_begin >= task.row_end) return;
      if (cut.parts > 1) task.partial = partials.at(item, part);
      k_.forward(a, task, scratch + worker * forward_scratch_);
    });
    if (cut.parts > 1) {
      parallel_for(items, threads_, [&](int64_t item, int) {
        const ForwardTask task = task_at(item, 0);
        if (task.row_begin >= task.row_end) return;
        k_.join_partials(a, task, partials.at(item, 0), partials.stride(),
                         static_cast<int>(cut.parts));
      });
    }
    return {};
  }

  Status backward(const BackwardTensors& t, Workspace workspace, Stream) const override {
    Arguments a = arguments_of(p_, t);
    auto* at = static_cast<std::byte*>(workspace.data);
    const Sequence* sequences = write_sequences(p_, t, at);
    at += sequence_bytes();
    const bool packed = p_.layout == Layout::kPacked;
    const int64_t rows = packed ? p_.total_q : p_.q_len;
    a.delta = {reinterpret_cast<float*>(at), packed ? 0 : p_.head_q * rows, rows, 1};
    at += delta_bytes();
    std::byte* const scratch = at;
    at += threads_ * backward_scratch_;
    const BackwardCut& cut = backward_;
    const Partials dq_parts{at, cut.key_parts, dq_partial_bytes()};
    if (cut.key_parts > 1) at += heads() * cut.key_parts * dq_partial_bytes();
    const Partials dkv_parts{at, cut.head_parts, dkv_partial_bytes()};

    if (cut.key_parts > 1) {  // otherwise a task writes its own, where it reads dout anyway
      over_query_rows(sequences, [&](const Head& head, int64_t head_q, int64_t begin, int64_t end) {
        k_.delta(a, head, head_q, begin, end);
      });
    }

    parallel_for(
        heads() * cut.head_parts * cut.key_parts, threads_, [&](int64_t index, int worker) {
          BackwardTask task;
          // The first keys of all heads first: under a causal mask they take longest.
          const int64_t head = index % heads(), head_part = index / heads() % cut.head_parts;
          const int64_t key_part = index / heads() / cut.head_parts;
          task.head = {sequences[head / p_.head_kv], head / p_.head_kv, head % p_.head_kv};
          const int64_t kv_len = task.head.sequence.kv_len;
          task.head_begin = head_part * cut.heads;
          task.head_end = std::min(task.head_begin + cut.heads, group());
          task.key_begin = std::min(key_part * cut.keys, kv_len);
          task.key_end = std::min(task.key_begin + cut.keys, kv_len);
          if (cut.key_parts > 1) task.dq_partial = dq_parts.at(head, key_part);
          if (cut.head_parts > 1) task.dkv_partial = dkv_parts.at(head, head_part);
          k_.backward(a, task, scratch + worker * backward_scratch_);
        });
    if (cut.key_parts > 1) {
      over_query_rows(sequences, [&](const Head& head, int64_t head_q, int64_t begin, int64_t end) {
        k_.join_dq(a, head, head_q, begin, end,
                   {dq_parts.at(head.b * p_.head_kv + head.kv, 0), dq_parts.stride(), cut.keys});
      });
    }
    if (cut.head_parts > 1) {
      over_keys(sequences, [&](const Head& head, int64_t begin, int64_t end) {
        k_.join_dkv(
            a, head, begin, end,
            {dkv_parts.at(head.b * p_.head_kv + head.kv, 0), dkv_parts.stride(), dkv_parts.count});
      });
    }
    zero_padding_keys(t, sequences);
    if (t.dbias.given()) bias_gradient(a, t, sequences, scratch);
    if (t.dsink.given()) sink_gradient(a, t, sequences);
    return {};
  }

 private:
  static int64_t aligned(size_t bytes) { return round_up(static_cast<int64_t>(bytes), kAlign); }
  int64_t heads() const { return p_.batch * p_.head_kv; }
  int64_t group() const { return p_.head_q / p_.head_kv; }
  int64_t sequence_bytes() const {
    return round_up(p_.batch * static_cast<int64_t>(sizeof(Sequence)), kAlign);
  }
  int64_t delta_bytes() const {
    const int64_t rows = p_.layout == Layout::kPacked ? p_.total_q : p_.batch * p_.q_len;
    return round_up(rows * p_.head_q * static_cast<int64_t>(sizeof(float)), kAlign);
  }
  int64_t partial_bytes() const {
    return round_up(k_.partial_floats(arguments_of(p_), forward_.rows) * int64_t{sizeof(float)},
                    kAlign);
  }
  int64_t dq_partial_bytes() const {
    return round_up(group() * p_.q_len * p_.dim_qk * int64_t{sizeof(float)}, kAlign);
  }
  int64_t dkv_partial_bytes() const {
    return round_up(p_.kv_len * (p_.dim_qk + p_.dim_v) * int64_t{sizeof(float)}, kAlign);
  }

  // body(head, begin, end) for all keys.
  template <typename Body>
  void over_keys(const Sequence* sequences, const Body& body) const {
    const int64_t chunks = ceil_div(p_.kv_len, kRowsOfStep);
    parallel_for(heads() * chunks, threads_, [&](int64_t item, int) {
      const int64_t begin = item % chunks * kRowsOfStep, of_all = item / chunks;
      const int64_t b = of_all / p_.head_kv;
      const int64_t end = std::min(begin + kRowsOfStep, sequences[b].kv_len);
      if (begin < end) body(Head{sequences[b], b, of_all % p_.head_kv}, begin, end);
    });
  }

  // body(head, query head, begin, end) for all rows of queries, tiles of the backward pass whole.
  template <typename Body>
  void over_query_rows(const Sequence* sequences, const Body& body) const {
    const int64_t rows = round_up(kRowsOfStep, k_.sizes.backward_tile_q);
    const int64_t chunks = ceil_div(p_.q_len, rows);
    parallel_for(p_.batch * p_.head_q * chunks, threads_, [&](int64_t item, int) {
      const int64_t begin = item % chunks * rows, of_all = item / chunks;
      const int64_t b = of_all / p_.head_q, head_q = of_all % p_.head_q;
      const int64_t end = std::min(begin + rows, sequences[b].q_len);
      if (begin < end) body(Head{sequences[b], b, head_q / group()}, head_q, begin, end);
    });
  }

  // Keys past a key length have no gradient, but their rows exist.
  void zero_padding_keys(const BackwardTensors& t, const Sequence* sequences) const {
    if (!has(p_.features, Feature::kKeyLengths)) return;
    const int64_t size = dtype_bytes(p_.dtype);
    for (int64_t b = 0; b < p_.batch; ++b) {
      for (int64_t j = sequences[b].kv_len; j < p_.kv_len; ++j) {
        for (int64_t h = 0; h < p_.head_kv; ++h) {
          for (const TensorView* grad : {&t.dk, &t.dv}) {
            auto* row = static_cast<std::byte*>(grad->data) +
                        (b * grad->strides[0] + j * grad->strides[1] + h * grad->strides[2]) * size;
            std::fill_n(row, grad->sizes[3] * size, std::byte{0});
          }
        }
      }
    }
  }

  void bias_gradient(const Arguments& a, const BackwardTensors& t, const Sequence* sequences,
                     std::byte* scratch) const {
    const TensorView& dbias = t.dbias;
    const int64_t tile_q = dbias.sizes[2] == 1 ? p_.q_len : k_.sizes.backward_tile_q;
    const int64_t tiles_q = dbias.sizes[2] == 1 ? 1 : ceil_div(p_.q_len, tile_q);
    const int64_t tile_kv = k_.sizes.backward_tile_kv, tiles_kv = ceil_div(p_.kv_len, tile_kv);
    const int64_t tiles = dbias.sizes[0] * dbias.sizes[1] * tiles_q * tiles_kv;
    parallel_for(tiles, threads_, [&](int64_t index, int worker) {
      BiasGradientTask task;
      task.dbias = dbias.data;
      task.strides = broadcast_strides(dbias);
      task.type = dbias.dtype == DType::kF32 ? BiasType::kF32 : BiasType::kLikeProblem;
      task.sequences = sequences;
      task.key_begin = index % tiles_kv * tile_kv;
      task.key_end = std::min(task.key_begin + tile_kv, p_.kv_len);
      index /= tiles_kv;
      task.q_begin = index % tiles_q * tile_q;
      task.q_end = std::min(task.q_begin + tile_q, p_.q_len);
      index /= tiles_q;
      task.head = index % dbias.sizes[1];
      task.head_count = p_.head_q / dbias.sizes[1];
      task.b = index / dbias.sizes[1];
      task.b_count = p_.batch / dbias.sizes[0];
      k_.bias_gradient(a, task, scratch + worker * backward_scratch_);
    });
  }

  void sink_gradient(const Arguments& a, const BackwardTensors& t,
                     const Sequence* sequences) const {
    parallel_for(p_.head_q, threads_, [&](int64_t h, int) {
      double total = 0;
      const double sink = a.sink[h * a.sink_head];
      for (int64_t b = 0; b < p_.batch; ++b) {
        const Sequence& s = sequences[b];
        for (int64_t i = 0; i < s.q_len; ++i) {
          const double lse = a.lse.at(s.batch_at, h, s.q_row + i);
          if (lse == -std::numeric_limits<double>::infinity()) continue;  // and so is the sink
          total -= std::exp(sink - lse) * a.delta.at(s.batch_at, h, s.q_row + i);
        }
      }
      static_cast<float*>(t.dsink.data)[h * t.dsink.strides[0]] = static_cast<float>(total);
    });
  }

  const AttentionProblem p_;
  const std::string isa_;
  const int threads_;
  const Kernels& k_;
  const ForwardCut forward_;
  const BackwardCut backward_;
  int64_t forward_scratch_ = 0, backward_scratch_ = 0;  // bytes per worker
};

}  // namespace
}  // namespace cpu

namespace {

class CpuBackend : public Backend {
 public:
  const char* name() const override { return "cpu"; }

  std::vector<std::string> refusals(const AttentionProblem& p,
                                    const DeviceInfo& device) const override {
    std::vector<std::string> reasons;
    if (device.device.type != DeviceType::kCpu) return {"device is cuda, takes cpu"};
    if (cpu::kernels_for(device.isa, DType::kF32) == nullptr) {
      reasons.push_back("isa is \"" + device.isa + "\", this machine does not have it");
    }
    if (p.dtype != DType::kF32 && p.dtype != DType::kF16 && p.dtype != DType::kBf16) {
      reasons.push_back(std::string("dtype is ") + dtype_name(p.dtype) + ", takes f32, f16, bf16");
    }
    for (const auto& [dim, value] : {std::pair{"dim_qk", p.dim_qk}, std::pair{"dim_v", p.dim_v}}) {
      if (value > kMaxDim) {
        reasons.push_back(std::string(dim) + " is " + std::to_string(value) + ", takes 1.." +
                          std::to_string(kMaxDim));
      }
    }
    return reasons;
  }

  std::unique_ptr<BoundKernel> bind(const AttentionProblem& p,
                                    const DeviceInfo& device) const override {
    return std::make_unique<cpu::CpuKernel>(p, device, *cpu::kernels_for(device.isa, p.dtype));
  }

 private:
  static constexpr int64_t kMaxDim = 8192;  // blocks of keys are whole rows in scratch
};

}  // namespace

const Backend& cpu_backend() {
  static const CpuBackend backend;
  return backend;
}

}  // namespace fovea
