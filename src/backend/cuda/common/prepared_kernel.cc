// Shared memory is asked for, and the architecture that the code was compiled for is looked up.
#include "backend/cuda/common/prepared_kernel.h"

#include <atomic>

namespace fovea::cuda {
namespace {

constexpr int kSharedBytesOfAll = 32 * 1024;  // with a block's own variables below 48 KiB
constexpr int kEarlyArchitecture = 90;

}  // namespace

cudaError_t PreparedKernel::on_current_device(const void* kernel, int shared_bytes,
                                              bool& begins_early) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  State state = device < kDevices ? std::atomic_ref(states_[device]).load(std::memory_order_acquire)
                                  : kUnknown;
  if (state == kUnknown) {
    cudaError_t error = cudaSuccess;
    if (shared_bytes > kSharedBytesOfAll) {
      error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    }
    cudaFuncAttributes attributes{};
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
    // What was compiled from the PTX of an older architecture does not wait.
    state = attributes.ptxVersion >= kEarlyArchitecture ? kBeginsEarly : kBeginsLate;
    if (device < kDevices) {
      std::atomic_ref(states_[device]).store(state, std::memory_order_release);
    }
  }
  begins_early = state == kBeginsEarly;
  return cudaSuccess;
}

}  // namespace fovea::cuda
