// Which problems the Hopper engine takes, and the forward pass.
#include "backend/cuda/hopper/backend.h"

#include <algorithm>
#include <numbers>
#include <string>

#include "backend/cuda/common/call.h"
#include "backend/cuda/common/error.h"
#include "backend/cuda/hopper/backward/bound.h"
#include "backend/cuda/hopper/backward/plan.h"
#include "backend/cuda/hopper/forward/plan.h"
#include "backend/cuda/hopper/tensor_map.h"
#include "backend/cuda/portable/backend.h"
#include "backend/sequence.h"

namespace fovea::cuda {
namespace {

using hopper::ForwardArguments;
using hopper::ForwardPlan;

constexpr int kSm = 90;
constexpr size_t kTicketBytes = 64;
constexpr int64_t kSmallDim = 32;
constexpr int64_t kLeastShare = 4;   // one multiprocessor in that many has a tile
constexpr int64_t kFewQueries = 64;  // of a head: a warpgroup's rows
constexpr int64_t kMaxRows = int64_t{1} << 30;

// Warpgroups that met scores out of range do all that follows with a running maximum, and which
// tiles follow is a matter of timing: where bits have to be the same, all tiles are done so.
hopper::Care usual_care(const AttentionProblem& p, const DeviceInfo& device) {
  const bool running_max =
      device.softmax == SoftmaxRule::kRunningMax || p.determinism == Determinism::kRequired;
  if (running_max) return hopper::kSafe;
  return p.softcap > hopper::CapSeries::kMostBound ? hopper::kFar : hopper::kBold;
}

// What a call's arguments hold that does not depend on its tensors.
ForwardArguments plan_arguments(const AttentionProblem& p, const ForwardPlan& plan,
                                hopper::Care care) {
  ForwardArguments a{};
  // Of what softcap leaves, a number between -1 and 1, or of the product.
  const double unit = p.softcap > 0 ? p.softcap : scale_of(p);
  a.to_log2 = static_cast<float>(unit * std::numbers::log2e);
  if (p.softcap > 0) a.cap_series = hopper::CapSeries::of(scale_of(p), p.softcap);
  a.care = care;
  a.schedule.heads = static_cast<int>(p.batch * p.head_q);
  a.schedule.section_heads = plan.section_heads;
  a.schedule.row_tiles = plan.row_tiles;
  a.schedule.parts = plan.parts;
  a.schedule.part_keys = plan.part_keys;
  a.schedule.tiles = plan.row_tiles * a.schedule.heads * plan.parts;
  a.schedule.turns = plan.turns;
  return a;
}

class HopperKernel : public BoundKernel {
 public:
  HopperKernel(const AttentionProblem& problem, const DeviceInfo& device)
      : p_(problem),
        device_(device.device.index),
        plan_(hopper::plan_forward(problem, device.gpu)),
        planned_(plan_arguments(problem, plan_, usual_care(problem, device))),
        portable_(portable_backend().bind(problem, device)) {}

  std::string name() const override {
    const hopper::ForwardConfig& c = plan_.kernel->config;
    return std::string("hopper/") + dtype_name(p_.dtype) + "/d" + std::to_string(c.dim_qk) +
           (c.dim_v == c.dim_qk ? "" : "v" + std::to_string(c.dim_v)) + "/" +
           std::to_string(c.tile_q()) + "x" + std::to_string(c.tile_kv) +
           (c.capped ? "/softcap" : "") + (c.resident ? "/resident" : "");
  }

  std::string describe() const override {
    const auto text = [](int64_t n) { return std::to_string(n); };
    return "wgmma and TMA; forward: " + text(plan_.row_tiles) + " tiles of " +
           text(plan_.kernel->config.tile_q()) + " rows a head, heads in sections of " +
           text(plan_.section_heads) + ", " +
           (plan_.parts > 1 ? "keys in " + text(plan_.parts) + " parts, " : "") +
           text(plan_.blocks) + " blocks" + (plan_.ticket ? " that claim them" : "") +
           (planned_.care == hopper::kSafe ? ", running maximum" : "") +
           "; tensors that TMA does not take, and backward: portable; " + portable_->describe();
  }

  size_t workspace_bytes(Pass pass) const override {
    const size_t portable = portable_->workspace_bytes(pass);
    if (pass == Pass::kBackward) return portable;
    if (plan_.parts > 1) {
      return std::max(portable, static_cast<size_t>(Parts::bytes(plan_.parts, rows(), p_.dim_v)));
    }
    return std::max(portable, plan_.ticket ? kTicketBytes : size_t{0});
  }

  Status forward(const ForwardTensors& t, Workspace workspace, Stream stream) const override {
    if (plan_.blocks == 0) return portable_->forward(t, workspace, stream);
    for (const TensorView* tensor : {&t.q, &t.k, &t.v, &t.out}) {
      if (!hopper::takes_map(*tensor)) return portable_->forward(t, workspace, stream);
    }
    const hopper::ForwardConfig& c = plan_.kernel->config;
    ForwardArguments a = planned_;
    CUresult encoded = CUDA_SUCCESS;
    const auto encode = [&](CUtensorMap& map, const TensorView& tensor, int rows) {
      if (encoded == CUDA_SUCCESS) encoded = hopper::encode_map(map, tensor, rows);
    };
    encode(a.q, t.q, hopper::kRowsOfWarpgroup);
    encode(a.k, t.k, c.tile_kv);
    encode(a.v, t.v, c.tile_kv);
    encode(a.out, t.out, hopper::kRowsOfWarpgroup);
    // Whatever the driver has against these tensors, or where it is too old to be asked.
    if (encoded != CUDA_SUCCESS) return portable_->forward(t, workspace, stream);
    a.p = problem_of(p_, t);
    a.values = rows_of(t.v);
    a.results = rows_of(t.out);
    a.lse = scalars_of(t.lse);
    const CurrentDevice current(device_);
    if (Status s = to_status(current.error(), "forward: choosing the device"); !s.ok()) return s;
    const auto on = static_cast<cudaStream_t>(stream.handle);
    if (plan_.ticket) a.schedule.ticket = static_cast<int*>(workspace.data);
    if (plan_.parts > 1) a.parts = Parts::in(workspace.data, plan_.parts, rows());
    if (Status s =
            to_status(plan_.kernel->launch(a, plan_.blocks, on), "forward: launching the kernel");
        !s.ok() || plan_.parts == 1) {
      return s;
    }
    const MergePartsArguments merge = {a.p, static_cast<int>(p_.batch), a.parts, a.results, a.lse};
    return to_status(plan_.kernel->merge(merge, on), "forward: launching the merge");
  }

  Status backward(const BackwardTensors& t, Workspace workspace, Stream stream) const override {
    return portable_->backward(t, workspace, stream);
  }

 private:
  int64_t rows() const { return p_.batch * p_.head_q * p_.q_len; }

  const AttentionProblem p_;
  const int device_;
  const ForwardPlan plan_;
  const ForwardArguments planned_;
  const std::unique_ptr<const BoundKernel> portable_;
};

class HopperBackend : public Backend {
 public:
  const char* name() const override { return "hopper"; }

  std::vector<std::string> refusals(const AttentionProblem& p,
                                    const DeviceInfo& device) const override {
    if (device.device.type != DeviceType::kCuda) return {"device is cpu, takes cuda"};
    std::vector<std::string> reasons = portable_backend().refusals(p, device);
    const auto refuse = [&](bool when, std::string reason) {
      if (when) reasons.push_back(std::move(reason));
    };
    const auto text = [](int64_t n) { return std::to_string(n); };
    refuse(device.gpu.sm != kSm, "compute capability is " + text(device.gpu.sm / 10) + "." +
                                     text(device.gpu.sm % 10) + ", takes 9.0");
    refuse(p.dtype != DType::kF16 && p.dtype != DType::kBf16,
           std::string("dtype is ") + dtype_name(p.dtype) + ", takes f16, bf16");
    for (const auto& [feature, what] :
         {std::pair{Feature::kBias, "a bias"}, std::pair{Feature::kBoolMask, "a boolean mask"},
          std::pair{Feature::kAlibi, "ALiBi"}}) {
      refuse(has(p.features, feature), std::string("takes no problem with ") + what);
    }
    refuse(p.dropout > 0, "takes no dropout");
    refuse(p.mask.prefix > 0, "takes no mask with a prefix");
    refuse(!(scale_of(p) > 0), "scale is not positive");
    for (const auto& [name, dim] : {std::pair{"dim_qk", p.dim_qk}, std::pair{"dim_v", p.dim_v}}) {
      refuse(dim % 8 != 0, std::string(name) + " is " + text(dim) + ", takes multiples of 8");
    }
    const bool packed = p.layout == Layout::kPacked;
    refuse(std::max(packed ? p.total_q : p.q_len, packed ? p.total_kv : p.kv_len) > kMaxRows,
           "takes up to " + text(kMaxRows) + " rows");
    if (reasons.empty()) {
      const ForwardPlan plan = hopper::plan_forward(p, device.gpu);
      refuse(plan.kernel == nullptr, "no instance holds head dims " + text(p.dim_qk) + " and " +
                                         text(p.dim_v) + " of " + dtype_name(p.dtype));
    }
    return reasons;
  }

  // H200: a head of 512 x 64 takes 9.1 us here and 7.1 with the portable engine, 16 heads of 256
  // 7.2 and 9.8.
  std::string reluctance(const AttentionProblem& p, const DeviceInfo& device) const override {
    if (hopper::find_backward(p, device.gpu) != nullptr) return {};
    if (std::max(p.dim_qk, p.dim_v) <= kSmallDim) {
      return "head dims up to " + std::to_string(kSmallDim) +
             " are faster with the portable engine";
    }
    const int64_t group = p.head_q / p.head_kv;
    if (group > 1 && p.q_len < kFewQueries) {
      return "the " + std::to_string(p.q_len) + " queries of " + std::to_string(group) +
             " heads that share keys are one tile with the portable engine";
    }
    const ForwardPlan plan = hopper::plan_forward(p, device.gpu);
    if (kLeastShare * plan.blocks >= device.gpu.sm_count) return {};
    return "rows and keys are " + std::to_string(plan.blocks) + " tiles: too few for " +
           std::to_string(device.gpu.sm_count) +
           " multiprocessors, which the portable engine keeps busy";
  }

  std::unique_ptr<BoundKernel> bind(const AttentionProblem& p,
                                    const DeviceInfo& device) const override {
    if (const auto* const kernel = hopper::find_backward(p, device.gpu); kernel != nullptr) {
      return std::make_unique<hopper::SmallHeads>(p, device, *kernel);
    }
    return std::make_unique<HopperKernel>(p, device);
  }
};

}  // namespace

const Backend& hopper_backend() {
  static const HopperBackend backend;
  return backend;
}

}  // namespace fovea::cuda
