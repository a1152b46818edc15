// The GPUs of this machine, as values for plan/. Without CUDA in the build there are none.
#pragma once

#include <span>
#include <string>

#include "backend/backend.h"

namespace fovea {

// Who asks for a device, as refusals name it.
struct DeviceRequest {
  const char* call = "make_plan";
  const char* argument = "device";
  const char* without = "no backend takes this problem on ";  // what cannot be done without one
};

// Whether there is such a device.
Status check_cuda_device(Device device, const DeviceRequest& request = {});

// What a plan needs to know of one GPU. Refused where there is no such device.
Result<DeviceInfo> discover_cuda(Device device);

// How many there are; 0 without a driver, or without CUDA in this build.
int cuda_device_count();

// Why there are none: "no NVIDIA driver is installed". Empty where there are some.
std::string cuda_absence();

// The CUDA engines of this build, the preferred first.
std::span<const Backend* const> cuda_backends();

// Memory for one call, taken and given back in the order of the stream's work. `call` is the one
// that a refusal names.
Result<void*> cuda_allocate(const char* call, Device device, size_t bytes, Stream stream);
void cuda_free(Device device, void* memory, Stream stream);

// "13.0", or empty in a build without CUDA.
const char* cuda_version();

}  // namespace fovea
