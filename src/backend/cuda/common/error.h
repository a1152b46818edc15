// CUDA errors as Status.
#pragma once

#include <cuda_runtime_api.h>

#include "fovea/status.h"

namespace fovea::cuda {

// `what` is the call that failed, as the message names it: "forward: launching the kernel".
Status to_status(cudaError_t error, const char* what);

// Makes a device the current one of this thread while it lives.
class CurrentDevice {
 public:
  explicit CurrentDevice(int index) {
    error_ = cudaGetDevice(&before_);
    if (error_ == cudaSuccess && before_ != index) error_ = cudaSetDevice(index);
    moved_ = error_ == cudaSuccess && before_ != index;
  }
  ~CurrentDevice() {
    if (moved_) (void)cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  cudaError_t error() const { return error_; }

 private:
  int before_ = 0;
  bool moved_ = false;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace fovea::cuda
