// A problem of small heads: the portable engine's in everything but the backward pass.
#pragma once

#include <string>

#include "backend/cuda/hopper/backward/kernels.h"
#include "backend/cuda/portable/kernel.h"

namespace fovea::cuda::hopper {

class SmallHeads : public PortableKernel {
 public:
  SmallHeads(const AttentionProblem& problem, const DeviceInfo& device,
             const BackwardKernel& kernel);

  std::string name() const override;
  std::string describe() const override;

 protected:
  cudaError_t launch_backward(const cuda::BackwardArguments& a, const BackwardTensors& t,
                              cudaStream_t stream) const override;

 private:
  const BackwardKernel& kernel_;
};

}  // namespace fovea::cuda::hopper
