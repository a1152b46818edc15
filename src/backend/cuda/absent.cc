// A build without CUDA: no devices, no engines.
#include "backend/cuda/device.h"
#include "backend/cuda/merge.h"
#include "base/refusal.h"

namespace fovea {
namespace {

constexpr const char* kWhy = "this library was built without CUDA";

}  // namespace

Status check_cuda_device(Device device, const DeviceRequest& request) {
  return unsupported(request.call, request.without + show(device), {{"cuda", {kWhy}}});
}

Result<DeviceInfo> discover_cuda(Device device) { return check_cuda_device(device); }

int cuda_device_count() { return 0; }

std::string cuda_absence() { return kWhy; }

std::span<const Backend* const> cuda_backends() { return {}; }

Result<void*> cuda_allocate(const char* call, Device device, size_t, Stream) {
  return unsupported(call, "no memory can be had on " + show(device), {{"cuda", {kWhy}}});
}
void cuda_free(Device, void*, Stream) {}

Status cuda_merge(const PartialResult*, int64_t, const TensorView& out, const TensorView&, Stream) {
  return unsupported("merge", "nothing here merges on " + show(out.device), {{"cuda", {kWhy}}});
}

const char* cuda_version() { return ""; }

}  // namespace fovea
