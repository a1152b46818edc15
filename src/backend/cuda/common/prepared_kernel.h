// What has to be said to each device, and asked of it, before a kernel's first launch there.
#pragma once

#include <cuda_runtime_api.h>

namespace fovea::cuda {

class PreparedKernel {
 public:
  // begins_early: its code for this device waits by itself for the kernels before it.
  cudaError_t on_current_device(const void* kernel, int shared_bytes, bool& begins_early);

 private:
  enum State : unsigned char { kUnknown, kBeginsLate, kBeginsEarly };
  static constexpr int kDevices = 32;  // others are asked at every launch

  State states_[kDevices] = {};  // touched as atomics; <atomic> would cost every kernel a second
};

}  // namespace fovea::cuda
