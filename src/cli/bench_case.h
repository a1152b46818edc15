// Measures one case on one device: fovea's plan and every peer that takes it, checked against the
// oracle and then timed side by side.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "cli/gpu_state.h"
#include "cli/peer.h"
#include "cli/results.h"
#include "cli/timing.h"
#include "plan/device.h"

namespace fovea::cli {

struct BenchCase {
  std::string suite;
  std::string text;
  harness::Case one_case;
};

struct BenchSetup {
  DeviceInfo device;
  std::string backend;  // of the subject; empty: the plan's choice
  int threads = 1;      // of the CPU
  bool check = true;
  double check_cost = 0;  // multiply-adds the oracle may spend on one check
  bool reference_peer = false;
  TorchPeer* torch = nullptr;  // null: not asked for, or not to be had
  std::vector<std::string> torch_backends;
  TimingSettings timing;
  GpuWatch* watch = nullptr;                     // with a GPU
  std::map<DType, std::optional<double>> peaks;  // measured on first use
};

// Told at the start and the end of each pass.
struct BenchObserver {
  std::function<void(Pass)> begin;
  std::function<void(Pass, const std::string& outcome)> end;
};

// Rows in the order subject, peers for each pass; what could not be measured goes to skipped. Fails
// where fovea itself cannot do the case.
Status bench_case(const BenchCase& what, BenchSetup& setup, const BenchObserver& observer,
                  std::vector<Row>& rows, std::vector<Skipped>& skipped);

}  // namespace fovea::cli
