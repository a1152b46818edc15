// What is small heads' own: the name, and which tensors their kernel takes.
#include "backend/cuda/hopper/backward/bound.h"

#include "backend/cuda/hopper/backward/plan.h"
#include "backend/cuda/hopper/tensor_map.h"

namespace fovea::cuda::hopper {

SmallHeads::SmallHeads(const AttentionProblem& problem, const DeviceInfo& device,
                       const BackwardKernel& kernel)
    : PortableKernel(problem, device, blocks_of(kernel.config, problem, device.gpu)),
      kernel_(kernel) {}

std::string SmallHeads::name() const {
  return std::string("hopper/") + dtype_name(kernel_.dtype) + "/d" +
         std::to_string(kernel_.config.dim) + "/backward";
}

std::string SmallHeads::describe() const {
  return "backward by wgmma and TMA; else, and tensors that TMA does not take: " +
         PortableKernel::describe();
}

cudaError_t SmallHeads::launch_backward(const cuda::BackwardArguments& a, const BackwardTensors& t,
                                        cudaStream_t stream) const {
  const int rows = kernel_.config.rows(), columns = kernel_.config.dim;
  BackwardArguments arguments{};
  const bool taken = takes_map(t.q) && takes_map(t.dout) && a.vector_k && a.vector_v &&
                     a.vector_dk && a.vector_dv &&
                     encode_map(arguments.q, t.q, rows, columns) == CUDA_SUCCESS &&
                     encode_map(arguments.dout, t.dout, rows, columns) == CUDA_SUCCESS;
  if (!taken) return PortableKernel::launch_backward(a, t, stream);
  arguments.a = a;
  return kernel_.launch(arguments, stream);
}

}  // namespace fovea::cuda::hopper
