// What the program runs on, and what it was built from.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace fovea::cli {

struct Machine {
  std::string cpu;            // "AMD EPYC 9654 96-Core Processor"
  std::string architecture;   // "x86_64"
  int cores = 0;              // physical, of the whole machine; 0 when it does not say
  int threads = 0;            // logical, that this process may use
  std::optional<double> mhz;  // highest the machine reports
  int64_t memory_bytes = 0;
  double load = 0;  // runnable threads over the last minute: what else the machine is doing
  std::string os;
  std::string compiler;
};
Machine this_machine();

// The commit of the checkout the program was built from, with "-dirty" where files differ from it;
// "unknown" when that checkout is gone.
std::string source_commit();

std::string date_now();  // "2026-11-15T02:45:21Z"

}  // namespace fovea::cli
