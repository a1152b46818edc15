// The public calls: check the arguments, plan, run.
#include <memory>

#include "api/check.h"
#include "api/guard.h"
#include "backend/cuda/device.h"
#include "base/refusal.h"
#include "fovea/host_memory.h"
#include "fovea/plan.h"
#include "plan/build.h"
#include "plan/cache.h"
#include "plan/device.h"

namespace fovea {
namespace {

// What one call of a convenience needs besides its tensors.
Status with_workspace(const char* call, const Plan& plan, Pass pass, Device device, Stream stream,
                      const auto& run) {
  const size_t bytes = plan.workspace_bytes(pass);
  if (bytes == 0) return run(Workspace{});
  if (device.type == DeviceType::kCuda) {
    Result<void*> memory = cuda_allocate(call, device, bytes, stream);
    if (memory.ok()) {
      Status done = run(Workspace{*memory, bytes});
      cuda_free(device, *memory, stream);
      return done;
    }
    if (memory.status().code() != StatusCode::kOutOfMemory) return memory.status();
  } else {
    const Result<HostMemory> memory = HostMemory::allocate(bytes);
    if (memory.ok()) return run(memory->workspace());
  }
  return {StatusCode::kOutOfMemory, std::string(call) + ": a workspace of " +
                                        std::to_string(bytes) +
                                        " bytes could not be allocated on " + show(device)};
}

Result<Plan> find_or_build(const AttentionProblem& problem, Device device,
                           const PlanOptions& options) {
  if (Status s = check_problem(problem); !s.ok()) return s;
  Result<DeviceInfo> info = discover(device, options);
  if (!info.ok()) return info.status();
  if (auto known = plan_cache().find(problem, *info, options.backend)) {
    return Plan(std::move(known));
  }
  auto built = build_plan(problem, *info, options.backend);
  if (!built.ok()) return built.status();
  plan_cache().insert(*built);
  return Plan(std::move(*built));
}

}  // namespace

const AttentionProblem& Plan::problem() const { return impl_->problem; }
const std::string& Plan::backend() const { return impl_->backend; }
const std::string& Plan::kernel() const { return impl_->kernel_name; }

std::string Plan::explain() const {
  try {
    return explain_plan(*impl_);
  } catch (...) {
    return {};  // no memory for the text; nothing else can fail
  }
}

size_t Plan::workspace_bytes(Pass pass) const {
  return impl_->workspace_bytes[pass == Pass::kBackward ? 1 : 0];
}

Status Plan::forward(const ForwardTensors& tensors, Workspace workspace, Stream stream) const {
  return guarded<Status>([&] {
    Status s = check_forward(impl_->problem, impl_->device.device, tensors);
    if (s.ok()) s = check_workspace("forward", workspace, workspace_bytes(Pass::kForward));
    return s.ok() ? impl_->kernel->forward(tensors, workspace, stream) : s;
  });
}

Status Plan::backward(const BackwardTensors& tensors, Workspace workspace, Stream stream) const {
  return guarded<Status>([&] {
    Status s = check_backward(impl_->problem, impl_->device.device, tensors);
    if (s.ok()) s = check_workspace("backward", workspace, workspace_bytes(Pass::kBackward));
    return s.ok() ? impl_->kernel->backward(tensors, workspace, stream) : s;
  });
}

Result<Plan> make_plan(const AttentionProblem& problem, Device device, const PlanOptions& options) {
  return guarded<Result<Plan>>([&] { return find_or_build(problem, device, options); });
}

Status attention_forward(const AttentionProblem& problem, const ForwardTensors& tensors,
                         Stream stream) {
  return guarded<Status>([&] {
    Result<Plan> plan = make_plan(problem, tensors.q.device);
    if (!plan.ok()) return plan.status();
    return with_workspace(
        "attention_forward", *plan, Pass::kForward, tensors.q.device, stream,
        [&](Workspace workspace) { return plan->forward(tensors, workspace, stream); });
  });
}

Status attention_backward(const AttentionProblem& problem, const BackwardTensors& tensors,
                          Stream stream) {
  return guarded<Status>([&] {
    Result<Plan> plan = make_plan(problem, tensors.q.device);
    if (!plan.ok()) return plan.status();
    return with_workspace(
        "attention_backward", *plan, Pass::kBackward, tensors.q.device, stream,
        [&](Workspace workspace) { return plan->backward(tensors, workspace, stream); });
  });
}

}  // namespace fovea
