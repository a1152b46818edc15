// Devices as the command line names them.
#include "cli/device_name.h"

#include <charconv>

#include "backend/cuda/device.h"
#include "base/refusal.h"

namespace fovea::cli {

Result<Device> parse_device(const std::string& command, const std::string& text) {
  if (text == "cpu") return Device::cpu();
  if (text == "cuda") return Device::cuda(0);
  const std::string prefix = "cuda:";
  if (text.rfind(prefix, 0) == 0) {
    const char* end = text.data() + text.size();
    int index = -1;
    const auto [stop, error] = std::from_chars(text.data() + prefix.size(), end, index);
    if (error == std::errc() && stop == end && index >= 0) return Device::cuda(index);
  }
  return refuse(command, "--device", "\"" + text + "\"", must("be cpu, cuda or cuda:N"));
}

Device best_device() { return cuda_device_count() > 0 ? Device::cuda(0) : Device::cpu(); }

}  // namespace fovea::cli
