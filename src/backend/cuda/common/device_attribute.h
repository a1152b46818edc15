// What the runtime says of the current device.
#pragma once

#include <cuda_runtime_api.h>

namespace fovea::cuda {

// 0 where there is no device to ask.
inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  const bool said = cudaGetDevice(&device) == cudaSuccess &&
                    cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess;
  return said ? value : 0;
}

}  // namespace fovea::cuda
