// Where tensors live and where work is queued.
//
//   fovea::Device cpu = fovea::Device::cpu();
//   fovea::Device gpu = fovea::Device::cuda(0);
//   fovea::Stream stream{cuda_stream};  // a cudaStream_t; the CPU runs at once and ignores it
#pragma once

namespace fovea {

// The values are DLPack's (kDLCPU, kDLCUDA).
enum class DeviceType { kCpu = 1, kCuda = 2 };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int index = 0;

  static constexpr Device cpu() { return {}; }
  static constexpr Device cuda(int index) { return {DeviceType::kCuda, index}; }
  friend constexpr bool operator==(Device a, Device b) = default;
};

struct Stream {
  void* handle = nullptr;
};

}  // namespace fovea
