// Runs a case and compares its outputs with the oracle.
#include "harness/accuracy.h"

#include "harness/comparison.h"

namespace fovea::harness {
namespace {

Accuracy failed(const Status& status) {
  Accuracy a;
  a.tensor = status.message();
  return a;
}

Accuracy damaged(const char* what) {
  Accuracy a;
  a.tensor = what;
  return a;
}

}  // namespace

std::vector<Accuracy> measure_accuracy(const Case& c, const Plan& plan, CaseTensors& tensors,
                                       double cost_limit) {
  tensors.poison_outputs();
  OwnedWorkspace forward_space(plan.workspace_bytes(Pass::kForward));
  if (Status s = plan.forward(tensors.forward(), forward_space.view()); !s.ok()) return {failed(s)};
  if (!forward_space.canaries_intact()) return {damaged("forward wrote past its workspace")};
  if (c.backward) {
    OwnedWorkspace backward_space(plan.workspace_bytes(Pass::kBackward));
    Status s = plan.backward(tensors.backward(), backward_space.view());
    if (!s.ok()) return {failed(s)};
    if (!backward_space.canaries_intact()) return {damaged("backward wrote past its workspace")};
  }
  std::vector<Accuracy> found = compare_with_oracle(c, tensors, true, c.backward, cost_limit);
  if (!tensors.canaries_intact()) found.push_back(damaged("a call wrote past an output"));
  if (!tensors.inputs_unchanged()) found.push_back(damaged("a call wrote to an input"));
  return found;
}

std::vector<Accuracy> compare_with_oracle(const Case& c, const CaseTensors& tensors, bool forward,
                                          bool backward, double cost_limit) {
  Comparison comparison(c, tensors, cost_limit);
  std::vector<Accuracy> found;
  if (forward) found = comparison.forward();
  if (backward) {
    for (Accuracy& a : comparison.backward()) found.push_back(std::move(a));
  }
  return found;
}

}  // namespace fovea::harness
