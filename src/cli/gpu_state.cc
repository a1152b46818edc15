// Asks nvidia-smi.
#include "cli/gpu_state.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <sstream>

#include "cli/process.h"
#include "cli/timing.h"

namespace fovea::cli {
namespace {

constexpr const char* kFields = "driver_version,clocks.sm,clocks.mem,power.limit,power.draw";

std::optional<double> reading(const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (end == text.c_str()) return std::nullopt;
  return value;
}

std::optional<double> median(const std::vector<GpuState>& states,
                             std::optional<double> GpuState::*field) {
  std::vector<double> values;
  for (const GpuState& state : states) {
    if (state.*field) values.push_back(*(state.*field));
  }
  if (values.empty()) return std::nullopt;
  std::sort(values.begin(), values.end());
  return quantile(values, 0.5);
}

}  // namespace

GpuState parse_gpu_state(const std::string& line) {
  std::vector<std::string> fields;
  std::stringstream stream(line);
  for (std::string field; std::getline(stream, field, ',');) {
    field.erase(0, field.find_first_not_of(' '));
    fields.push_back(field);
  }
  if (fields.size() != 5) return {};
  return {fields[0], reading(fields[1]), reading(fields[2]), reading(fields[3]),
          reading(fields[4])};
}

GpuState typical_state(const std::vector<GpuState>& states) {
  GpuState typical;
  for (const GpuState& state : states) {
    if (!state.driver.empty()) typical.driver = state.driver;
  }
  typical.sm_mhz = median(states, &GpuState::sm_mhz);
  typical.memory_mhz = median(states, &GpuState::memory_mhz);
  typical.power_limit_w = median(states, &GpuState::power_limit_w);
  typical.power_w = median(states, &GpuState::power_w);
  return typical;
}

void GpuWatch::look() {
  if (looking_.valid()) {
    if (looking_.wait_for(std::chrono::seconds(0)) != std::future_status::ready) return;
    collect();
  }
  std::vector<std::string> command = {"nvidia-smi", std::string("--query-gpu=") + kFields,
                                      "--format=csv,noheader,nounits"};
  if (!bus_id_.empty()) command.push_back("--id=" + bus_id_);
  looking_ = std::async(std::launch::async, [command] { return output_of(command); });
}

void GpuWatch::collect() {
  const std::string answer = looking_.get();
  seen_.push_back(parse_gpu_state(answer.substr(0, answer.find('\n'))));
}

GpuState GpuWatch::typical() {
  if (looking_.valid()) collect();
  return typical_state(seen_);
}

}  // namespace fovea::cli
