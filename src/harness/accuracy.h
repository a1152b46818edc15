// Runs a case and holds every output against the float64 oracle under the 2x rule: the error may be
// twice that of the plain unfused formula in the same dtype, and no more.
//
//   CaseTensors tensors(c);
//   for (const Accuracy& a : measure_accuracy(c, plan, tensors)) {
//     if (!a.ok) std::printf("%s: error %g, bound %g\n", a.tensor.c_str(), a.max_err, a.bound);
//   }
#pragma once

#include <string>
#include <vector>

#include "fovea/plan.h"
#include "harness/case.h"
#include "harness/tensors.h"

namespace fovea::harness {

struct Accuracy {
  std::string tensor;  // "out", "lse", "dq", ...; or the message of a call that failed
  double max_err = 0;
  double bound = 0;  // for max_err
  double rms = 0;
  double rms_bound = 0;
  double mean_err = 0;  // signed: should be about 0
  bool ok = false;
};

Accuracy failed(const Status& status);  // of a call

// Multiply-adds the oracle may spend on one case; a larger case is checked on a sub-sample of its
// rows and keys, drawn from the case's seed.
inline constexpr double kDefaultCost = 2e9;

// Runs the plan, forward and then backward where the case asks, from poisoned outputs and
// workspace, then compares. A call that fails gives one entry, not ok, that holds its message. The
// device is the one that the plan was made for; the tensors stay on the host, a GPU gets a copy.
std::vector<Accuracy> measure_accuracy(const Case& c, const Plan& plan, CaseTensors& tensors,
                                       Device device = Device::cpu(),
                                       double cost_limit = kDefaultCost);

// The comparison alone, of outputs that are there already.
std::vector<Accuracy> compare_with_oracle(const Case& c, const CaseTensors& tensors, bool forward,
                                          bool backward, double cost_limit = kDefaultCost);

}  // namespace fovea::harness
