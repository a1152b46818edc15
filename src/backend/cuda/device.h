// The GPUs of this machine, as values for plan/. Without CUDA in the build there are none.
#pragma once

#include <span>

#include "backend/backend.h"

namespace fovea {

// What a plan needs to know of one GPU. Refused where there is no such device.
Result<DeviceInfo> discover_cuda(Device device);

// How many there are; 0 without a driver, or without CUDA in this build.
int cuda_device_count();

// The CUDA engines of this build, the preferred first.
std::span<const Backend* const> cuda_backends();

// Memory for one call, taken and given back in the order of the stream's work.
Result<void*> cuda_allocate(Device device, size_t bytes, Stream stream);
void cuda_free(Device device, void* memory, Stream stream);

// "13.0", or empty in a build without CUDA.
const char* cuda_version();

}  // namespace fovea
