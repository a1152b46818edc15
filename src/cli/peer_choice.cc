// Names of peers.
#include "cli/peer_choice.h"

#include "base/refusal.h"

namespace fovea::cli {
namespace {

const std::vector<std::string>& torch_engines(Device device) {
  static const std::vector<std::string> cpu = {"cpu"};
  static const std::vector<std::string> gpu = {"flash", "cudnn", "efficient"};
  return device.type == DeviceType::kCpu ? cpu : gpu;
}

std::string names_on(Device device) {
  std::string names = "torch, ";
  for (const std::string& engine : torch_engines(device)) names += "torch-" + engine + ", ";
  if (device.type == DeviceType::kCpu) names += "reference, ";
  return names.substr(0, names.size() - 2) + " or none";
}

}  // namespace

Result<PeerChoice> choose_peers(const std::vector<std::string>& names, Device device) {
  const std::vector<std::string>& engines = torch_engines(device);
  PeerChoice choice;
  std::vector<bool> wanted(engines.size());
  for (const std::string& name : names) {
    bool known = name == "none" || name == "torch";
    if (name == "reference" && device.type == DeviceType::kCpu) known = choice.reference = true;
    for (size_t i = 0; i < engines.size(); ++i) {
      const bool meant = name == "torch" || name == "torch-" + engines[i];
      wanted[i] = wanted[i] || meant;
      known = known || meant;
    }
    if (!known) {
      return refuse("bench", "--peers", name,
                    must("be " + names_on(device) + " on " + show(device)));
    }
  }
  for (size_t i = 0; i < engines.size(); ++i) {
    if (wanted[i]) choice.torch.push_back(engines[i]);
  }
  return choice;
}

}  // namespace fovea::cli
