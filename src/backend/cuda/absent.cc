// A build without CUDA: no devices, no engines.
#include "backend/cuda/device.h"
#include "base/refusal.h"

namespace fovea {

Result<DeviceInfo> discover_cuda(Device device) {
  return unsupported("make_plan", "no backend takes this problem on " + show(device),
                     {{"cuda", {"this library was built without CUDA"}}});
}

int cuda_device_count() { return 0; }

std::span<const Backend* const> cuda_backends() { return {}; }

Result<void*> cuda_allocate(Device device, size_t, Stream) {
  return unsupported("allocate", "no memory can be had on " + show(device),
                     {{"cuda", {"this library was built without CUDA"}}});
}
void cuda_free(Device, void*, Stream) {}

const char* cuda_version() { return ""; }

}  // namespace fovea
