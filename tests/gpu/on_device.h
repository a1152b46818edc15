// A case that stays on the GPU between calls: for tests of repetition, streams and graphs.
#pragma once

#include <cuda_runtime_api.h>

#include "harness/device_tensors.h"
#include "support/engines.h"

namespace fovea::test {

class OnDevice {
 public:
  OnDevice(const Engine& engine, const harness::Case& c);

  // The inputs, outputs of NaN, workspaces of NaN.
  void reset();
  // Queues forward, and backward where the case asks.
  Status launch(cudaStream_t stream);
  // Queues forward with the outputs of `before` as queries.
  Status launch_after(const OnDevice& before, cudaStream_t stream);
  // Waits, and gives every byte of the tensors: guards, padding and inputs among them. Fails the
  // test where a guard or an input was written to.
  std::vector<std::byte> result();

 private:
  harness::Case case_;
  Engine engine_;
  Plan plan_;
  harness::CaseTensors host_;
  harness::DeviceTensors there_;
  harness::DeviceWorkspace forward_space_, backward_space_;
};

}  // namespace fovea::test
