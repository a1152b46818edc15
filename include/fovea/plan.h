// How to compute it: a plan is made once per problem, is immutable, cheap to copy and safe to use
// from many threads. Nothing below make_plan allocates or synchronises.
//
//   auto plan = fovea::make_plan(problem, fovea::Device::cpu());
//   if (!plan.ok()) return plan.status();
//   auto memory = fovea::HostMemory::allocate(plan->workspace_bytes(fovea::Pass::kForward));
//   if (!memory.ok()) return memory.status();
//   fovea::Status done = plan->forward(tensors, memory->workspace());
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "fovea/attention.h"

namespace fovea {

enum class Pass { kForward, kBackward };

// Scratch memory of the caller, aligned to kWorkspaceAlignment (fovea/host_memory.h has some that
// suits the CPU); its contents are never read before
// they are written, and mean nothing afterwards. One call at a time may use it.
inline constexpr size_t kWorkspaceAlignment = 64;
struct Workspace {
  void* data = nullptr;
  size_t bytes = 0;
};

// What weights of softmax refer to. Results agree either way, to rounding.
enum class SoftmaxRule {
  kAny,  // whatever the engine does fastest; checked, and done again where it went out of range
  kRunningMax,  // the largest score so far, always
};

// How the reference engine computes, and the layers on it.
enum class Arithmetic {
  kExact,  // in float64, each result rounded once
  // As a framework does without fused kernels: every intermediate tensor rounded to the dtype, sums
  // in f32, one term after the other. Its error is what errors of engines are measured by.
  kPlain,
};

struct PlanOptions {
  std::string
      backend;      // a name from `fovea info` ("cpu", "reference"); empty: the best that takes it
  int threads = 0;  // CPU engines; 0: FOVEA_NUM_THREADS, or all cores this process may use
  SoftmaxRule softmax = SoftmaxRule::kAny;     // Hopper engine; the others have one way
  Arithmetic arithmetic = Arithmetic::kExact;  // reference engine; the others have one way

  friend bool operator==(const PlanOptions&, const PlanOptions&) = default;
};

class Plan {
 public:
  struct Impl;
  explicit Plan(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

  const AttentionProblem& problem() const;
  const std::string& backend() const;  // "cpu"
  const std::string& kernel() const;   // "cpu/amx/bf16", as the benchmark reports it
  std::string explain() const;  // the choice, its parameters, and why the others were passed over
  size_t workspace_bytes(Pass pass) const;

  Status forward(const ForwardTensors& tensors, Workspace workspace, Stream stream = {}) const;
  Status backward(const BackwardTensors& tensors, Workspace workspace, Stream stream = {}) const;

 private:
  std::shared_ptr<const Impl> impl_;
};

Result<Plan> make_plan(const AttentionProblem& problem, Device device,
                       const PlanOptions& options = {});

// One-call conveniences: plan, allocate the workspace, run.
Status attention_forward(const AttentionProblem& problem, const ForwardTensors& tensors,
                         Stream stream = {});
Status attention_backward(const AttentionProblem& problem, const BackwardTensors& tensors,
                          Stream stream = {});

}  // namespace fovea
