// Which problems the portable engine takes, which kernel it gives them, and the two passes.
#include "backend/cuda/portable/backend.h"

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <span>
#include <string>
#include <tuple>

#include "backend/cuda/common/call.h"
#include "backend/cuda/common/error.h"
#include "backend/cuda/portable/backward/kernels.h"
#include "backend/cuda/portable/forward/kernels.h"
#include "backend/sequence.h"
#include "base/refusal.h"

namespace fovea::cuda {
namespace {

constexpr int kOldestSm = 80;
constexpr int64_t kMaxDim = 256;
constexpr int64_t kMaxLength = int64_t{1} << 30;
constexpr int64_t kMaxParts = 64;
constexpr int64_t kSplitBlocks = 2;        // of an SM, that keys are cut for
constexpr int64_t kLeastSplitKeys = 1024;  // below it a merge takes longer than the keys
constexpr int64_t kFewKeys = 1024;         // that a block of few rows may read for them alone
constexpr int64_t kFewRows = 64;           // of a KV head, for which keys are read about once
constexpr int64_t kSharedBlocks = 2;       // of an SM, whose warps share rows
constexpr int64_t kManyWaves = 8;          // of blocks: enough that the last one hardly matters
constexpr int64_t kLeastRowTiles = 2;      // of a part of the rows that a tile of keys meets
constexpr int64_t kSmallRowTiles = 64;     // the same with small heads, where the GPU is full
constexpr int64_t kShortKeys = 128;        // of an SM, for one launch that does all
constexpr int64_t kShortRows = 1024;       // ...
constexpr int64_t kShortWork = 5 << 18;    // ... scores by head dim
constexpr double kLeastScale = 1e-6;       // that a term is divided by

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What scores need besides a positive scale and a range of visible keys.
Terms terms_of(const AttentionProblem& p) {
  const bool cap = p.softcap > 0, alibi = has(p.features, Feature::kAlibi);
  const bool bias = has(p.features, Feature::kBias), mask = has(p.features, Feature::kBoolMask);
  const int count = int{cap} + int{alibi} + int{bias} + int{mask};
  if (p.dropout > 0 || !(scale_of(p) > 0) || count > 1) return Terms::kAny;
  if (count == 0) return Terms::kNone;
  // What is added comes divided by the scale.
  if (scale_of(p) < kLeastScale || scale_of(p) > 1 / kLeastScale) return Terms::kAny;
  return bias ? Terms::kBias : mask ? Terms::kMask : Terms::kComputed;
}

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

template <typename Config>
int padded_dims(const Config& c) {
  return c.dim_qk + c.dim_v;
}

// The smallest instance that holds the head dims, of those that suit; null where there is none.
template <typename Kernel, typename Suits>
const Kernel* find_instance(std::span<const Kernel* const> table, const AttentionProblem& p,
                            Terms terms, Suits suits) {
  const Kernel* best = nullptr;
  for (const Kernel* kernel : table) {
    const auto& c = kernel->config;
    if (kernel->dtype != p.dtype || c.terms != terms || !suits(c)) continue;
    if (c.dim_qk < p.dim_qk || c.dim_v < p.dim_v) continue;
    if (best == nullptr || padded_dims(c) < padded_dims(best->config)) best = kernel;
  }
  return best;
}

// Tiles take rows through the heads of a group, unless a head nearly fills them: rows of two heads
// see different keys.
bool tiles_of_heads(const AttentionProblem& p, const ForwardConfig& c) {
  return 2 * p.q_len > c.tile_q();
}
int64_t row_tiles(const AttentionProblem& p, const ForwardConfig& c) {
  const int64_t group = p.head_q / p.head_kv;
  return tiles_of_heads(p, c) ? group * ceil_div(p.q_len, c.tile_q())
                              : ceil_div(group * p.q_len, c.tile_q());
}

// Warps share rows where there are so few that all blocks run at once, and each of them can afford
// to read its keys alone: they are few, or the rows of a KV head are.
const ForwardKernel* find_forward(const AttentionProblem& p, const GpuInfo& gpu) {
  const Terms terms = terms_of(p);
  const auto of_width = [&](Width width) {
    return find_instance(forward_kernels(), p, terms,
                         [&](const ForwardConfig& c) { return c.width == width; });
  };
  const ForwardKernel* const wide = of_width(Width::kWide);
  if (terms != Terms::kNone && terms != Terms::kAny) {
    // Few dims have kernels of their own for these; one that is a third too large still is faster.
    const ForwardKernel* const any =
        find_instance(forward_kernels(), p, Terms::kAny, [](const ForwardConfig&) { return true; });
    const bool fits = wide != nullptr && any != nullptr &&
                      3 * padded_dims(wide->config) <= 4 * padded_dims(any->config);
    return fits ? wide : any;
  }
  if (wide == nullptr) return nullptr;
  const int64_t rows = p.head_q / p.head_kv * p.q_len;
  if (p.kv_len > kFewKeys && rows > kFewRows) return wide;
  for (const Width width : {Width::kQuads, Width::kPairs}) {
    const ForwardKernel* const shared = of_width(width);
    if (shared == nullptr || shared->config.dim_qk != wide->config.dim_qk) continue;
    const int64_t blocks = row_tiles(p, shared->config) * p.batch * p.head_kv;
    if (blocks <= kSharedBlocks * gpu.sm_count) return shared;
  }
  return wide;
}

const BackwardKernel* find_backward(const AttentionProblem& p) {
  const Terms terms = terms_of(p) == Terms::kNone ? Terms::kNone : Terms::kAny;
  return find_instance(backward_kernels(), p, terms, [](const BackwardConfig&) { return true; });
}

// Keys are cut into parts when rows alone would leave the GPU idle.
struct ForwardCut {
  int64_t tiles = 0;  // of rows, a KV head
  int64_t parts = 1;
  int64_t part_keys = 0;
  bool longest_first = false;
};

ForwardCut cut_forward(const AttentionProblem& p, const ForwardConfig& c, const GpuInfo& gpu) {
  ForwardCut cut;
  cut.tiles = row_tiles(p, c);
  const int64_t blocks = std::max<int64_t>(1, cut.tiles * p.batch * p.head_kv);
  const int64_t key_tiles = std::max<int64_t>(1, ceil_div(p.kv_len, c.tile_kv));
  // With few blocks to a slot a long one at the end would leave the others idle; with many, blocks
  // of one head that run together find its keys in the L2 cache.
  cut.longest_first = p.mask.right >= 0 && blocks <= kManyWaves * c.blocks * gpu.sm_count;
  const int64_t wanted = kSplitBlocks * gpu.sm_count;
  if (blocks * 2 <= wanted && p.kv_len >= kLeastSplitKeys) {
    // A part of fewer than four tiles spends more on its start and the merge than it saves.
    cut.parts = std::clamp<int64_t>(std::min(wanted / blocks, key_tiles / 4), 1, kMaxParts);
  }
  const int64_t tiles_of_part = ceil_div(key_tiles, cut.parts);
  cut.part_keys = tiles_of_part * c.tile_kv;
  cut.parts = ceil_div(key_tiles, tiles_of_part);
  return cut;
}

// One pass for all gradients adds to sums in the workspace, in any order: not when two runs have to
// give the same bits, nor where its tiles do not fit the shared memory.
struct BackwardCut {
  bool one_pass = false;
  int64_t row_parts = 1;  // that the rows of a tile of keys are cut into
  bool first_keys_first = false;
  int64_t query_sum_rows = 0, key_sum_rows = 0;
  bool one_launch = false;  // of a call whose tensors suit it
};

// Whether a problem is over so soon that what is computed twice takes less than a second launch.
bool is_short(const AttentionProblem& p, int dim, int64_t sm_count) {
  const int64_t keys = p.batch * p.head_kv * p.kv_len, rows = p.batch * p.head_q * p.q_len;
  if (keys > kShortKeys * sm_count || rows > kShortRows * sm_count) return false;
  const int64_t scores = rows * p.kv_len / (p.mask.right >= 0 ? 2 : 1);
  return scores * dim <= kShortWork * sm_count;
}

BackwardCut cut_backward(const AttentionProblem& p, const BackwardConfig& c, const GpuInfo& gpu) {
  constexpr int64_t kTile = BackwardConfig::kSumTile;
  BackwardCut cut;
  cut.one_launch = c.small_heads && is_short(p, c.dim_qk, gpu.sm_count);
  cut.one_pass = c.one_pass() && p.determinism != Determinism::kRequired &&
                 c.key_shared_bytes() + kOwnSharedBytes <= gpu.shared_bytes;
  if (!cut.one_pass) return cut;
  const bool packed = p.layout == Layout::kPacked;
  const auto sum_rows = [&](int64_t rows) { return p.head_kv * (rows / kTile + p.batch) * kTile; };
  const int64_t group = p.head_q / p.head_kv;
  cut.query_sum_rows = sum_rows(group * (packed ? p.total_q : p.batch * p.q_len));
  // The longest first, that none is left over at the end; but heads one after another where not all
  // their sums stay in the cache.
  const int64_t sum_bytes = cut.query_sum_rows * c.dim_qk * int64_t{sizeof(float)};
  cut.first_keys_first = c.small_heads && p.mask.right >= 0 && sum_bytes <= gpu.l2_bytes;
  const int64_t blocks =
      std::max<int64_t>(1, p.batch * p.head_kv * ceil_div(p.kv_len, c.key_tile()));
  const int64_t tiles_of_rows = ceil_div(group * p.q_len, c.key_tile_q);
  const int64_t wanted = int64_t{c.key_blocks} * gpu.sm_count;
  if (blocks <= kManyWaves * wanted) {
    // A part of fewer tiles than that spends more on its start than it saves.
    int64_t most = tiles_of_rows / kLeastRowTiles;
    // With small heads a tile takes so little that parts are short only to fill the GPU.
    if (c.small_heads) {
      most = std::min(most, std::max(tiles_of_rows / kSmallRowTiles, ceil_div(wanted, blocks)));
    }
    cut.row_parts =
        std::clamp<int64_t>(std::min(ceil_div(kManyWaves * wanted, blocks), most), 1, kMaxParts);
  }
  if (cut.row_parts > 1) cut.key_sum_rows = sum_rows(packed ? p.total_kv : p.batch * p.kv_len);
  return cut;
}

// What a call's arguments hold that does not depend on its tensors.
ForwardArguments plan_forward(const AttentionProblem& p, const ForwardConfig& c,
                              const ForwardCut& cut) {
  ForwardArguments a{};
  a.batch = static_cast<int>(p.batch);
  a.longest_first = cut.longest_first;
  a.tiles_of_heads = tiles_of_heads(p, c);
  a.of_heads = Divider::by(p.batch * p.head_kv);
  a.of_head_kv = Divider::by(p.head_kv);
  a.of_tiles = Divider::by(cut.tiles);
  a.of_group = Divider::by(p.head_q / p.head_kv);
  a.parts = static_cast<int>(cut.parts);
  a.part_keys = static_cast<int>(cut.part_keys);
  return a;
}

BackwardArguments plan_backward(const AttentionProblem& p, const BackwardCut& cut,
                                const GpuInfo& gpu) {
  BackwardArguments a{};
  a.batch = static_cast<int>(p.batch);
  a.stat_rows = p.layout == Layout::kPacked ? p.total_q : p.q_len;
  a.row_parts = static_cast<int>(cut.row_parts);
  a.of_parts = Divider::by(cut.row_parts);
  a.of_heads = Divider::by(p.batch * p.head_kv);
  a.of_head_kv = Divider::by(p.head_kv);
  a.of_q_len = Divider::by(p.q_len);
  a.of_head_q = Divider::by(p.head_q);
  a.of_group = Divider::by(p.head_q / p.head_kv);
  a.one_launch = cut.one_launch;
  a.sm_count = gpu.sm_count;
  a.first_keys_first = cut.first_keys_first;
  return a;
}

class PortableKernel : public BoundKernel {
 public:
  PortableKernel(const AttentionProblem& problem, const DeviceInfo& device)
      : p_(problem),
        device_(device.device.index),
        forward_(*find_forward(problem, device.gpu)),
        backward_(*find_backward(problem)),
        cut_(cut_forward(problem, forward_.config, device.gpu)),
        backward_cut_(cut_backward(problem, backward_.one_pass, device.gpu)),
        planned_forward_(plan_forward(problem, forward_.config, cut_)),
        planned_backward_(plan_backward(problem, backward_cut_, device.gpu)) {}

  std::string name() const override {
    const ForwardConfig& c = forward_.config;
    return std::string("portable/") + dtype_name(p_.dtype) + "/d" + std::to_string(c.dim_qk) +
           (c.dim_v == c.dim_qk ? "" : "v" + std::to_string(c.dim_v)) +
           (c.terms == Terms::kAny        ? "/terms"
            : c.terms == Terms::kComputed ? "/computed-terms"
            : c.terms == Terms::kBias     ? "/bias"
            : c.terms == Terms::kMask     ? "/mask"
            : c.width == Width::kPairs    ? "/pairs"
            : c.width == Width::kQuads    ? "/quads"
                                          : "");
  }

  std::string describe() const override {
    const ForwardConfig& c = forward_.config;
    const auto text = [](int64_t n) { return std::to_string(n); };
    return "mma.sync; forward: tiles " + text(c.tile_q()) + " x " + text(c.tile_kv) + ", " +
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
    return static_cast<size_t>(cut_.parts * partial_rows() * (p_.dim_v + 2) *
                               int64_t{sizeof(float)});
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
    return to_status(forward_.merge(a, queue), "forward: launching the merge");
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
