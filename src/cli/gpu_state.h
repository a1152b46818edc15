// What nvidia-smi says of a GPU: its driver, and the clocks and power it runs at while it works.
//
//   GpuWatch watch(bus_id);
//   watch.look();                        // asks in the background, while something is measured
//   GpuState typical = watch.typical();  // waits for the answers
#pragma once

#include <future>
#include <optional>
#include <string>
#include <vector>

namespace fovea::cli {

struct GpuState {
  std::string driver;  // "580.159.04"; empty when there was no answer
  std::optional<double> sm_mhz;
  std::optional<double> memory_mhz;
  std::optional<double> power_limit_w;
  std::optional<double> power_w;
};

// One line of nvidia-smi; a field that is no number ("[N/A]") is absent.
GpuState parse_gpu_state(const std::string& line);

// The median of each field over the states that have it.
GpuState typical_state(const std::vector<GpuState>& states);

// Looks at one GPU several times, without holding up who asks. Where there is no nvidia-smi every
// answer is empty.
class GpuWatch {
 public:
  explicit GpuWatch(std::string bus_id) : bus_id_(std::move(bus_id)) {}

  void look();  // nothing while the last look is under way
  GpuState typical();

 private:
  void collect();

  std::string bus_id_;
  std::future<std::string> looking_;
  std::vector<GpuState> seen_;
};

}  // namespace fovea::cli
