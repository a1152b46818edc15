// A plan as it is kept: a checked problem bound to the engine that was chosen for it.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "base/refusal.h"
#include "plan/choose.h"

namespace fovea {

struct Plan::Impl {
  AttentionProblem problem;  // as the caller gave it
  DeviceInfo device;
  std::string asked;  // the backend asked for; empty: the best
  std::string backend;
  std::string kernel_name;
  std::unique_ptr<const BoundKernel> kernel;
  std::array<size_t, 2> workspace_bytes{};  // by Pass
  std::vector<EngineRefusal> passed_over;
};

// The problem has been checked already.
Result<std::shared_ptr<const Plan::Impl>> build_plan(
    const AttentionProblem& problem, const DeviceInfo& device, const std::string& asked,
    std::span<const Backend* const> table = backends());

std::string explain_plan(const Plan::Impl& plan);

}  // namespace fovea
