// Discovery of GPUs, once per device and process.
#include "backend/cuda/device.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <optional>

#include "backend/cuda/common/error.h"
#include "backend/cuda/hopper/backend.h"
#include "backend/cuda/portable/backend.h"
#include "base/refusal.h"

namespace fovea {
namespace {

constexpr int kMaxDevices = 64;

// As CUDA writes versions: 13010 is 13.1.
std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// The devices of this process, or why it has none.
struct Census {
  int count = 0;
  cudaError_t error = cudaSuccess;
};

Census count_devices() {
  Census census;
  census.error = cudaGetDeviceCount(&census.count);
  if (census.error != cudaSuccess) {
    (void)cudaGetLastError();  // no driver is not an error of the next call
    census.count = 0;
  }
  census.count = std::min(census.count, kMaxDevices);
  return census;
}

// Where no driver is installed the runtime calls it insufficient: its version tells them apart.
std::string absence_of(const Census& census) {
  if (census.error == cudaErrorInsufficientDriver) {
    int driver = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess) (void)cudaGetLastError();
    if (driver == 0) return "no NVIDIA driver is installed";
    return "the NVIDIA driver takes programs of CUDA " + version_text(driver) +
           ", this library was built with " + cuda_version();
  }
  if (census.error != cudaSuccess) return cudaGetErrorString(census.error);
  return census.count == 0 ? "the driver lists none" : "";
}

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

int cuda_device_count() { return count_devices().count; }

std::string cuda_absence() { return absence_of(count_devices()); }

Status check_cuda_device(Device device, const DeviceRequest& request) {
  const Census census = count_devices();
  if (census.count == 0) {
    return unsupported(request.call, request.without + show(device),
                       {{"cuda", {"no CUDA device was found: " + absence_of(census)}}});
  }
  if (device.index < 0 || device.index >= census.count) {
    return refuse(request.call, std::string(request.argument) + ".index",
                  show(int64_t{device.index}), must_be_in(0, census.count - 1));
  }
  return {};
}

Result<DeviceInfo> discover_cuda(Device device) {
  static std::mutex mutex;
  static std::array<std::optional<DeviceInfo>, kMaxDevices> known;
  if (Status s = check_cuda_device(device); !s.ok()) return s;
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
  static const Backend* const table[] = {&cuda::hopper_backend(), &cuda::portable_backend()};
  return table;
}

Result<void*> cuda_allocate(const char* call, Device device, size_t bytes, Stream stream) {
  const cuda::CurrentDevice current(device.index);
  void* memory = nullptr;
  const cudaError_t error =
      current.error() != cudaSuccess
          ? current.error()
          : cudaMallocAsync(&memory, bytes, static_cast<cudaStream_t>(stream.handle));
  if (error == cudaSuccess) return memory;
  if (error == cudaErrorNotSupported) {  // some virtual GPUs
    (void)cudaGetLastError();
    return unsupported(call, "no memory can be had in the order of a stream on " + show(device),
                       {{"cuda", {"the device has no memory pools"}}},
                       "a plan takes a workspace of the caller's");
  }
  const std::string what =
      std::string(call) + ": allocating a workspace of " + std::to_string(bytes) + " bytes";
  return cuda::to_status(error, what.c_str());
}

void cuda_free(Device device, void* memory, Stream stream) {
  const cuda::CurrentDevice current(device.index);
  (void)cudaFreeAsync(memory, static_cast<cudaStream_t>(stream.handle));
}

const char* cuda_version() {
  static const std::string text = version_text(CUDART_VERSION);
  return text.c_str();
}

}  // namespace fovea
