// Which peers `--peers` means on a device.
#pragma once

#include <string>
#include <vector>

#include "fovea/device.h"
#include "fovea/status.h"

namespace fovea::cli {

struct PeerChoice {
  bool reference = false;          // fovea's own oracle engine
  std::vector<std::string> torch;  // engines of torch: "cpu", or "flash", "cudnn", "efficient"
};

// "torch" stands for every engine that torch has on the device, "torch-NAME" for one of them. A
// name that means nothing there is refused.
Result<PeerChoice> choose_peers(const std::vector<std::string>& names, Device device);

}  // namespace fovea::cli
