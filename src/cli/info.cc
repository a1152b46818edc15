// `fovea info`: the machine, the engines and the versions.
#include <cstdio>
#include <nlohmann/json.hpp>

#include "backend/cpu/isa.h"
#include "cli/commands.h"
#include "cli/machine.h"
#include "cli/support.h"
#include "cli/table.h"
#include "fovea/version.h"
#include "plan/choose.h"
#include "plan/device.h"

namespace fovea::cli {
namespace {

constexpr const char* kNoCuda = "none: this build has no CUDA";

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text.empty() ? "none" : text;
}

std::vector<std::string> backend_names() {
  std::vector<std::string> names;
  for (const Backend* backend : backends()) names.emplace_back(backend->name());
  return names;
}

void print_json(const Machine& m, const DeviceInfo& device) {
  nlohmann::ordered_json json = {
      {"version", version()},
      {"commit", source_commit()},
      {"compiler", m.compiler},
      {"cpu", m.cpu},
      {"architecture", m.architecture},
      {"cores", m.cores},
      {"threads_available", m.threads},
      {"threads", device.threads},
      {"mhz", m.mhz ? nlohmann::ordered_json(*m.mhz) : nlohmann::ordered_json()},
      {"memory_bytes", m.memory_bytes},
      {"os", m.os},
      {"isas", cpu_isas()},
      {"isa", device.isa},
      {"gpus", nlohmann::ordered_json::array()},
      {"cuda", nullptr},
      {"backends", backend_names()},
  };
  std::printf("%s\n", json.dump(2).c_str());
}

void print_text(const Machine& m, const DeviceInfo& device) {
  const auto line = [](const char* name, const std::string& value) {
    std::printf("%-10s  %s\n", name, value.c_str());
  };
  line("fovea", std::string(version()) + " (" + source_commit() + "), " + m.compiler);
  line("cpu", m.cpu + (m.mhz ? format(", %.0f MHz", *m.mhz) : ""));
  line("cores", std::to_string(m.cores) + ", of which this process may use " +
                    std::to_string(m.threads) + " threads; plans use " +
                    std::to_string(device.threads));
  line("memory", format("%.1f GiB", static_cast<double>(m.memory_bytes) / (1 << 30)));
  line("os", m.os + ", " + m.architecture);
  line("isa", device.isa + " (available: " + joined(cpu_isas()) + "; FOVEA_ISA chooses)");
  line("gpus", kNoCuda);
  line("backends", joined(backend_names()));
}

}  // namespace

int run_info(const InfoOptions& options) {
  if (options.support) {
    const Result<std::string> table = support_table();
    if (!table.ok()) {
      std::fprintf(stderr, "info: %s\n", table.status().message().c_str());
      return kExitUsage;
    }
    std::fputs(table->c_str(), stdout);
    return kExitOk;
  }
  const Result<DeviceInfo> device = discover(Device::cpu(), {});
  if (!device.ok()) {
    std::fprintf(stderr, "info: %s\n", device.status().message().c_str());
    return kExitUsage;
  }
  if (options.json) {
    print_json(this_machine(), *device);
  } else {
    print_text(this_machine(), *device);
  }
  return kExitOk;
}

}  // namespace fovea::cli
