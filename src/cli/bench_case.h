// Measures one case on one device: fovea and every peer that takes it, checked against the oracle
// and then timed side by side.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "cli/gpu_state.h"
#include "cli/peer.h"
#include "cli/peer_choice.h"
#include "cli/results.h"
#include "cli/timing.h"
#include "harness/layer_case.h"
#include "plan/device.h"

namespace fovea::cli {

struct BenchCase {
  std::string suite;
  std::string text;
  harness::AnyCase one_case;
};

struct BenchSetup {
  DeviceInfo device;
  std::string backend;  // of the subject; empty: the plan's choice
  int threads = 1;      // of the CPU
  bool check = true;
  double check_cost = 0;  // multiply-adds the oracle may spend on one check
  bool reference_peer = false;
  TorchPeer* torch = nullptr;  // null: not asked for, or not to be had
  TorchEngines torch_engines;
  TimingSettings timing;
  GpuWatch* watch = nullptr;      // with a GPU
  std::map<DType, double> peaks;  // of the CPU, FLOP/s: the best seen so far; 0 where none is known
};

bool on_gpu(const BenchSetup& setup);

// FLOP/s that nobody exceeds, as far as is known by now: of the CPU it is looked at before each
// pass.
std::optional<double> peak_of(const BenchSetup& setup, DType dtype);

// Whether peers get a case's tensors, which take so many bytes. On the CPU everybody always does.
TorchPeer::Inputs inputs_for(const BenchSetup& setup, size_t bytes);

std::vector<BenchPass> passes_of(const harness::AnyCase& c);

// Told at the start and the end of each pass.
struct BenchObserver {
  std::function<void(BenchPass)> begin;
  std::function<void(BenchPass, const std::string& outcome)> end;
};

// Rows in the order subject, peers for each pass, without their part of the peak, which may rise
// yet; what could not be measured goes to skipped. Fails where fovea itself cannot do the case.
Status bench_case(const BenchCase& what, BenchSetup& setup, const BenchObserver& observer,
                  std::vector<Row>& rows, std::vector<Skipped>& skipped);

}  // namespace fovea::cli
