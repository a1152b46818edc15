// A plan of this library as a contender.
#include "cli/contender.h"

#include <algorithm>
#include <chrono>

namespace fovea::cli {
namespace {

size_t workspace_needed(const Plan& plan, bool backward) {
  const size_t forward = plan.workspace_bytes(Pass::kForward);
  return backward ? std::max(forward, plan.workspace_bytes(Pass::kBackward)) : forward;
}

}  // namespace

FoveaContender::FoveaContender(Plan plan, harness::CaseTensors& tensors, bool backward)
    : plan_(std::move(plan)), tensors_(tensors), workspace_(workspace_needed(plan_, backward)) {}

Status FoveaContender::produce(BenchPass pass) {
  if (pass == BenchPass::kForward) return plan_.forward(tensors_.forward(), workspace_.view());
  return plan_.backward(tensors_.backward(), workspace_.view());
}

Result<double> FoveaContender::sample(BenchPass pass, int repeats, WarmRun warm) {
  if (warm == WarmRun::kUncounted) {
    if (Status done = produce(pass); !done.ok()) return done;
  }
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < repeats; ++i) {
    if (Status done = produce(pass); !done.ok()) return done;
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

std::optional<int64_t> FoveaContender::memory_bytes(BenchPass pass) {
  return static_cast<int64_t>(plan_.workspace_bytes(operator_pass(pass)));
}

}  // namespace fovea::cli
