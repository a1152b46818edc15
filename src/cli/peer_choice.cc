// Names of peers.
#include "cli/peer_choice.h"

#include <algorithm>

#include "base/refusal.h"

namespace fovea::cli {
namespace {

using Names = std::vector<std::string>;

// A layer that fovea's CCGQA is to beat, though it computes something else.
constexpr const char* kOtherLayer = "gqa-";

const TorchEngines& torch_engines(Device device) {
  static const TorchEngines cpu{{"cpu"}, {"cpu", "compile", "gqa-cpu"}};
  static const TorchEngines gpu{{"flash", "cudnn", "efficient"},
                                {"flash", "cudnn", "eager", "compile", "gqa-flash", "gqa-cudnn"}};
  return device.type == DeviceType::kCpu ? cpu : gpu;
}

bool holds(const Names& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// torch.compile takes half a minute a case on a CPU: it must be asked for by its name.
bool meant_by_torch(const std::string& engine, Device device) {
  return device.type != DeviceType::kCpu || engine != "compile";
}

// Those that were asked for, in the order of the table.
Names chosen(const Names& engines, const Names& asked, Device device) {
  Names kept;
  for (const std::string& engine : engines) {
    const bool with_all = holds(asked, "torch") && meant_by_torch(engine, device);
    if (with_all || holds(asked, "torch-" + engine)) kept.push_back(engine);
  }
  return kept;
}

std::string names_on(Device device) {
  std::string names = "torch, ";
  for (const std::string& engine : torch_engines(device).all()) names += "torch-" + engine + ", ";
  if (device.type == DeviceType::kCpu) names += "reference, ";
  return names.substr(0, names.size() - 2) + " or none";
}

}  // namespace

Names TorchEngines::all() const {
  Names names = of_operator;
  for (const std::string& engine : of_layer) {
    if (!holds(names, engine)) names.push_back(engine);
  }
  return names;
}

Names TorchEngines::of(const harness::LayerCase& c) const {
  if (c.kind == harness::LayerKind::kCcgqa) return of_layer;
  Names names;
  std::copy_if(of_layer.begin(), of_layer.end(), std::back_inserter(names),
               [](const std::string& name) { return name.rfind(kOtherLayer, 0) != 0; });
  return names;
}

Result<PeerChoice> choose_peers(const Names& names, Device device) {
  const TorchEngines& engines = torch_engines(device);
  PeerChoice choice;
  for (const std::string& name : names) {
    const bool of_torch = name.rfind("torch-", 0) == 0 && holds(engines.all(), name.substr(6));
    const bool reference = name == "reference" && device.type == DeviceType::kCpu;
    if (!of_torch && !reference && name != "torch" && name != "none") {
      return refuse("bench", "--peers", name,
                    must("be " + names_on(device) + " on " + show(device)));
    }
    choice.reference = choice.reference || reference;
  }
  choice.torch = {chosen(engines.of_operator, names, device),
                  chosen(engines.of_layer, names, device)};
  return choice;
}

}  // namespace fovea::cli
