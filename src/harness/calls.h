// The calls of a plan on the tensors of a case, wherever the plan runs: a GPU works on copies, and
// what it did to them comes back, guards included.
//
//   Calls calls(plan, tensors, Device::cuda(0));
//   Status done = calls.forward();   // then tensors holds the outputs
#pragma once

#include <memory>

#include "fovea/plan.h"
#include "harness/tensors.h"

namespace fovea::harness {

class DeviceTensors;

// The workspace that calls get: what it holds before, and bytes beyond what the plan asks for.
struct Scratch {
  int byte = kPoisonByte;
  size_t extra = 0;
};

class Calls {
 public:
  // The plan must be one for that device; the tensors must outlive this.
  Calls(Plan plan, CaseTensors& tensors, Device device = Device::cpu(), Scratch scratch = {});

  // Fails where the call does, where the device does, and where the call wrote past its workspace.
  Status forward();
  Status backward();

 private:
  Status run(Pass pass);
  Status run_here(Pass pass);
  Status run_there(Pass pass);

  Plan plan_;
  CaseTensors& tensors_;
  Device device_;
  Scratch scratch_;
  std::shared_ptr<DeviceTensors> there_;  // of a GPU's plan
};

}  // namespace fovea::harness
