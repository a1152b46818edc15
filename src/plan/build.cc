// Binding of a problem to its engine, and the text that says what was chosen.
#include "plan/build.h"

namespace fovea {

Result<std::shared_ptr<const Plan::Impl>> build_plan(const AttentionProblem& problem,
                                                     const DeviceInfo& device,
                                                     const std::string& asked,
                                                     std::span<const Backend* const> table) {
  const AttentionProblem tight = with_tight_mask(problem);
  Result<Choice> choice = choose(tight, device, asked, table);
  if (!choice.ok()) return choice.status();
  auto plan = std::make_shared<Plan::Impl>();
  plan->problem = problem;
  plan->device = device;
  plan->asked = asked;
  plan->backend = choice->backend->name();
  plan->passed_over = std::move(choice->passed_over);
  plan->kernel = choice->backend->bind(tight, device);
  if (plan->kernel == nullptr) {
    return Status(StatusCode::kInternal,
                  "make_plan: backend " + plan->backend + " took the problem and gave no kernel");
  }
  plan->kernel_name = plan->kernel->name();
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    plan->workspace_bytes[static_cast<size_t>(pass)] = plan->kernel->workspace_bytes(pass);
  }
  return std::shared_ptr<const Plan::Impl>(std::move(plan));
}

std::string explain_plan(const Plan::Impl& plan) {
  const auto bytes = [&](Pass pass) {
    return std::to_string(plan.workspace_bytes[static_cast<size_t>(pass)]) + " bytes";
  };
  std::string text = "kernel     " + plan.kernel_name;
  text += "\nhow        " + plan.kernel->describe();
  text += "\nworkspace  forward " + bytes(Pass::kForward) + ", backward " + bytes(Pass::kBackward);
  if (!plan.passed_over.empty()) text += "\npassed over" + refusal_lines(plan.passed_over);
  return text + "\n";
}

}  // namespace fovea
