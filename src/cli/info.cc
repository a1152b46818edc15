// `fovea info`: the machine, the engines and the versions.
#include <cstdio>
#include <nlohmann/json.hpp>

#include "backend/cpu/isa.h"
#include "backend/cuda/device.h"
#include "cli/commands.h"
#include "cli/json.h"
#include "cli/machine.h"
#include "cli/support.h"
#include "cli/table.h"
#include "fovea/version.h"
#include "plan/choose.h"
#include "plan/device.h"

namespace fovea::cli {
namespace {

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text.empty() ? "none" : text;
}

std::vector<GpuInfo> gpus() {
  std::vector<GpuInfo> all;
  for (int index = 0; index < cuda_device_count(); ++index) {
    Result<DeviceInfo> found = discover_cuda(Device::cuda(index));
    if (found.ok()) all.push_back(std::move(found->gpu));
  }
  return all;
}

std::string capability(const GpuInfo& gpu) {
  return std::to_string(gpu.sm / 10) + "." + std::to_string(gpu.sm % 10);
}

std::string gibibytes(int64_t bytes) {
  return format("%.1f GiB", static_cast<double>(bytes) / (1 << 30));
}

bool has_cuda() { return cuda_version()[0] != '\0'; }

std::vector<std::string> backend_names() {
  std::vector<std::string> names;
  for (const Backend* backend : backends()) names.emplace_back(backend->name());
  return names;
}

Json gpus_as_json() {
  auto list = Json::array();
  for (const GpuInfo& gpu : gpus()) {
    list.push_back({{"name", gpu.name},
                    {"compute_capability", capability(gpu)},
                    {"sms", gpu.sm_count},
                    {"memory_bytes", gpu.memory_bytes}});
  }
  return list;
}

void print_json(const Machine& m, const DeviceInfo& device) {
  Json json = {
      {"version", version()},
      {"commit", source_commit()},
      {"compiler", m.compiler},
      {"cpu", m.cpu},
      {"architecture", m.architecture},
      {"cores", m.cores},
      {"threads_available", m.threads},
      {"threads", device.threads},
      {"mhz", m.mhz ? Json(*m.mhz) : Json()},
      {"memory_bytes", m.memory_bytes},
      {"os", m.os},
      {"isas", cpu_isas()},
      {"isa", device.isa},
      {"gpus", gpus_as_json()},
      {"cuda", has_cuda() ? Json(cuda_version()) : Json()},
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
  line("memory", gibibytes(m.memory_bytes));
  line("os", m.os + ", " + m.architecture);
  line("isa", device.isa + " (available: " + joined(cpu_isas()) + "; FOVEA_ISA chooses)");
  const std::vector<GpuInfo> found = gpus();
  if (found.empty()) {
    const std::string why = cuda_absence();
    line("gpus", "none: " + (why.empty() ? "no device of this machine answers" : why));
  }
  for (size_t n = 0; n < found.size(); ++n) {
    line(n == 0 ? "gpus" : "", "cuda:" + std::to_string(n) + " " + found[n].name +
                                   ", compute capability " + capability(found[n]) + ", " +
                                   std::to_string(found[n].sm_count) + " SMs, " +
                                   gibibytes(found[n].memory_bytes));
  }
  line("cuda", has_cuda() ? std::string(cuda_version()) + " runtime" : "not in this build");
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
    std::printf("%s\n%s", table->c_str(), layer_support_table().c_str());
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
