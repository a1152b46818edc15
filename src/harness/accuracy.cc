// Runs a case and compares its outputs with the oracle.
#include "harness/accuracy.h"

#include "harness/calls.h"
#include "harness/comparison.h"

namespace fovea::harness {
namespace {

Accuracy damaged(const char* what) {
  Accuracy a;
  a.tensor = what;
  return a;
}

}  // namespace

Accuracy failed(const Status& status) {
  Accuracy a;
  a.tensor = status.message();
  return a;
}

std::vector<Accuracy> measure_accuracy(const Case& c, const Plan& plan, CaseTensors& tensors,
                                       Device device, double cost_limit) {
  tensors.poison_outputs();
  Calls calls(plan, tensors, device);
  if (Status s = calls.forward(); !s.ok()) return {failed(s)};
  if (c.backward) {
    if (Status s = calls.backward(); !s.ok()) return {failed(s)};
  }
  std::vector<Accuracy> found = compare_with_oracle(c, tensors, true, c.backward, cost_limit);
  if (!tensors.canaries_intact()) found.push_back(damaged("a call wrote past a tensor"));
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
