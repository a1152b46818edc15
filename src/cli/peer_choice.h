// Which peers `--peers` means on a device.
#pragma once

#include <string>
#include <vector>

#include "fovea/device.h"
#include "fovea/status.h"
#include "harness/layer_case.h"

namespace fovea::cli {

// Ways in which torch does a case, by what the case is.
struct TorchEngines {
  std::vector<std::string> of_operator;  // "cpu"; on a GPU "flash", "cudnn", "efficient"
  std::vector<std::string> of_layer;  // "cpu", "compile"; on a GPU "flash", "cudnn", "eager", ...

  std::vector<std::string> all() const;  // each once
  // Of a layer's those that take a layer of that kind.
  std::vector<std::string> of(const harness::LayerCase& c) const;
};

struct PeerChoice {
  bool reference = false;  // fovea's own oracle engine
  TorchEngines torch;
};

// "torch" stands for every engine that torch has on the device (on the CPU for all but "compile"),
// "torch-NAME" for one of them. A name that means nothing there is refused.
Result<PeerChoice> choose_peers(const std::vector<std::string>& names, Device device);

}  // namespace fovea::cli
