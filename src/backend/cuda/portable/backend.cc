// Which problems the portable engine takes, which kernel it gives them, and the two passes.
#include "backend/cuda/portable/backend.h"

#include <algorithm>
#include <span>
#include <string>
#include <tuple>

#include "backend/cuda/common/error.h"
#include "backend/cuda/portable/backward/kernels.h"
#include "backend/cuda/portable/call.h"
#include "backend/cuda/portable/forward/kernels.h"
#include "backend/sequence.h"
#include "base/refusal.h"

namespace fovea::cuda {
namespace {

constexpr int kOldestSm = 80;
constexpr int64_t kMaxDim = 256;
constexpr int64_t kMaxLength = int64_t{1} << 30;
constexpr int64_t kMaxParts = 64;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Whether scores need more than a positive scale and a range of visible keys.
Terms terms_of(const AttentionProblem& p) {
  const bool any = p.softcap > 0 || p.dropout > 0 || has(p.features, Feature::kBias) ||
                   has(p.features, Feature::kBoolMask) || has(p.features, Feature::kAlibi) ||
                   !(scale_of(p) > 0);
  return any ? Terms::kAny : Terms::kNone;
}

// The smallest instance that holds the head dims; null where there is none.
template <typename Kernel>
const Kernel* find_instance(std::span<const Kernel* const> table, const AttentionProblem& p) {
  const Kernel* best = nullptr;
  for (const Kernel* kernel : table) {
    const auto& c = kernel->config;
    if (kernel->dtype != p.dtype || c.terms != terms_of(p)) continue;
    if (c.dim_qk < p.dim_qk || c.dim_v < p.dim_v) continue;
    const auto size = [](const auto& x) { return x.dim_qk + x.dim_v; };
    if (best == nullptr || size(c) < size(best->config)) best = kernel;
  }
  return best;
}

// Keys are cut into parts when rows alone would leave the GPU idle.
struct ForwardCut {
  int64_t tiles = 0;  // of rows, a KV head
  int64_t parts = 1;
  int64_t part_keys = 0;
};

ForwardCut cut_forward(const AttentionProblem& p, const ForwardConfig& c, const GpuInfo& gpu) {
  ForwardCut cut;
  const int64_t rows = p.head_q / p.head_kv * p.q_len;
  cut.tiles = ceil_div(rows, c.tile_q());
  const int64_t blocks = std::max<int64_t>(1, cut.tiles * p.batch * p.head_kv);
  const int64_t key_tiles = std::max<int64_t>(1, ceil_div(p.kv_len, c.tile_kv));
  const int64_t wanted = int64_t{c.blocks} * gpu.sm_count;
  if (blocks * 2 <= wanted) {
    // A part of fewer than four tiles spends more on its start and the merge than it saves.
    cut.parts = std::clamp<int64_t>(std::min(wanted / blocks, key_tiles / 4), 1, kMaxParts);
  }
  const int64_t tiles_of_part = ceil_div(key_tiles, cut.parts);
  cut.part_keys = tiles_of_part * c.tile_kv;
  cut.parts = ceil_div(key_tiles, tiles_of_part);
  return cut;
}

class PortableKernel : public BoundKernel {
 public:
  PortableKernel(const AttentionProblem& problem, const DeviceInfo& device)
      : p_(problem),
        device_(device.device.index),
        forward_(*find_instance(forward_kernels(), problem)),
        backward_(*find_instance(backward_kernels(), problem)),
        cut_(cut_forward(problem, forward_.config, device.gpu)) {}

  std::string name() const override {
    const ForwardConfig& c = forward_.config;
    return std::string("portable/") + dtype_name(p_.dtype) + "/d" + std::to_string(c.dim_qk) +
           (c.dim_v == c.dim_qk ? "" : "v" + std::to_string(c.dim_v)) +
           (c.terms == Terms::kAny ? "/terms" : "");
  }

  std::string describe() const override {
    const ForwardConfig& c = forward_.config;
    const auto text = [](int64_t n) { return std::to_string(n); };
    return "mma.sync; forward: tiles " + text(c.tile_q()) + " x " + text(c.tile_kv) + ", " +
           text(cut_.tiles) + " tiles of rows a KV head, keys in " + text(cut_.parts) +
           (cut_.parts == 1 ? " part" : " parts") + "; backward: dk, dv by tiles of " +
           text(backward_.config.key_tile()) + " keys, dq by tiles of " +
           text(backward_.config.row_tile()) + " rows";
  }

  size_t workspace_bytes(Pass pass) const override {
    if (pass == Pass::kBackward) {
      return static_cast<size_t>(2 * stat_rows() * int64_t{sizeof(float)});
    }
    if (cut_.parts == 1) return 0;
    return static_cast<size_t>(cut_.parts * partial_rows() * (p_.dim_v + 2) *
                               int64_t{sizeof(float)});
  }

  Status forward(const ForwardTensors& t, Workspace workspace, Stream stream) const override {
    const int64_t blocks = cut_.tiles * p_.batch * p_.head_kv;
    if (blocks == 0) return {};
    ForwardArguments a{};
    a.p = problem_of(p_, t);
    a.q = rows_of(t.q);
    a.k = rows_of(t.k);
    a.v = rows_of(t.v);
    a.out = rows_of(t.out);
    a.lse = scalars_of(t.lse);
    a.vector_qk = takes_vectors(t.q) && takes_vectors(t.k);
    a.vector_v = takes_vectors(t.v);
    a.vector_out = takes_vectors(t.out);
    a.parts = static_cast<int>(cut_.parts);
    a.part_keys = static_cast<int>(cut_.part_keys);
    if (cut_.parts > 1) {
      a.partial_stats = static_cast<float2*>(workspace.data);
      a.partial = reinterpret_cast<float*>(a.partial_stats + cut_.parts * partial_rows());
    }
    const CurrentDevice current(device_);
    if (Status s = to_status(current.error(), "forward: choosing the device"); !s.ok()) return s;
    const auto queue = static_cast<cudaStream_t>(stream.handle);
    if (Status s = to_status(forward_.launch(a, blocks, queue), "forward: launching the kernel");
        !s.ok() || cut_.parts == 1) {
      return s;
    }
    return to_status(forward_.merge(a, static_cast<int>(p_.batch), queue),
                     "forward: launching the merge");
  }

  Status backward(const BackwardTensors& t, Workspace workspace, Stream stream) const override {
    BackwardArguments a{};
    a.p = problem_of(p_, t);
    a.batch = static_cast<int>(p_.batch);
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
    a.vector_dout = takes_vectors(t.dout);
    a.vector_dq = takes_vectors(t.dq);
    a.vector_dk = takes_vectors(t.dk);
    a.vector_dv = takes_vectors(t.dv);
    a.delta = static_cast<float*>(workspace.data);
    a.lse2 = a.delta + stat_rows();
    a.stat_rows = p_.layout == Layout::kPacked ? p_.total_q : p_.q_len;
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
  int64_t partial_rows() const { return p_.batch * p_.head_q * p_.q_len; }
  int64_t stat_rows() const {
    return p_.head_q * (p_.layout == Layout::kPacked ? p_.total_q : p_.batch * p_.q_len);
  }

  const AttentionProblem p_;
  const int device_;
  const ForwardKernel& forward_;
  const BackwardKernel& backward_;
  const ForwardCut cut_;
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
    if (reasons.empty() && find_instance(forward_kernels(), p) == nullptr) {
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
