// Discovery of GPUs, once per device and process.
#include "backend/cuda/device.h"

#include <array>
#include <mutex>
#include <optional>

#include "backend/cuda/common/error.h"
#include "backend/cuda/portable/backend.h"
#include "base/refusal.h"

namespace fovea {
namespace {

constexpr int kMaxDevices = 64;

Result<DeviceInfo> ask(Device device) {
  cudaDeviceProp properties{};
  if (Status s = cuda::to_status(cudaGetDeviceProperties(&properties, device.index),
                                 "make_plan: asking for the device's properties");
      !s.ok()) {
    return s;
  }
  DeviceInfo info;
  info.device = device;
  info.gpu.name = properties.name;
  info.gpu.sm = properties.major * 10 + properties.minor;
  info.gpu.sm_count = properties.multiProcessorCount;
  info.gpu.shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin);
  info.gpu.l2_bytes = properties.l2CacheSize;
  info.gpu.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  return info;
}

}  // namespace

int cuda_device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    (void)cudaGetLastError();  // no driver is not an error of the next call
    return 0;
  }
  return count;
}

Result<DeviceInfo> discover_cuda(Device device) {
  static std::mutex mutex;
  static std::array<std::optional<DeviceInfo>, kMaxDevices> known;
  const int count = std::min(cuda_device_count(), kMaxDevices);
  if (count == 0) {
    return unsupported("make_plan", "no backend takes this problem on " + show(device),
                       {{"cuda", {"no CUDA device was found"}}});
  }
  if (device.index >= count) {
    return refuse("make_plan", "device.index", show(int64_t{device.index}),
                  must_be_in(0, count - 1));
  }
  const std::lock_guard lock(mutex);
  auto& entry = known[static_cast<size_t>(device.index)];
  if (!entry) {
    Result<DeviceInfo> found = ask(device);
    if (!found.ok()) return found;
    entry = std::move(*found);
  }
  return *entry;
}

std::span<const Backend* const> cuda_backends() {
  static const Backend* const table[] = {&cuda::portable_backend()};
  return table;
}

Result<void*> cuda_allocate(Device device, size_t bytes, Stream stream) {
  const cuda::CurrentDevice current(device.index);
  void* memory = nullptr;
  const cudaError_t error =
      current.error() != cudaSuccess
          ? current.error()
          : cudaMallocAsync(&memory, bytes, static_cast<cudaStream_t>(stream.handle));
  if (Status s = cuda::to_status(error, "allocating a workspace"); !s.ok()) {
    (void)cudaGetLastError();
    return s;
  }
  return memory;
}

void cuda_free(Device device, void* memory, Stream stream) {
  const cuda::CurrentDevice current(device.index);
  (void)cudaFreeAsync(memory, static_cast<cudaStream_t>(stream.handle));
}

const char* cuda_version() {
  static const std::string text =
      std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
  return text.c_str();
}

}  // namespace fovea
