// Runs a plan on copies of a case's tensors in a GPU's memory.
#include "cli/cuda/contender.h"

#include <algorithm>
#include <map>
#include <utility>

#include "cli/cuda/replay.h"
#include "cli/timing.h"
#include "harness/device_tensors.h"

namespace fovea::cli {
namespace {

class CudaContender : public Contender {
 public:
  CudaContender(const Plan& plan, harness::CaseTensors& tensors, int device, size_t workspace)
      : plan_(plan), device_(device), there_(tensors, device), workspace_(workspace, device) {}

  Status reserve() { return workspace_.fill(harness::kPoisonByte); }

  std::string impl() const override { return "fovea-" + plan_.backend(); }
  std::string kernel() const override { return plan_.kernel(); }
  const char* timing(BenchPass) const override { return "graph"; }
  bool gives_lse() const override { return true; }

  Status produce(BenchPass pass) override {
    if (Status done = there_.upload(); !done.ok()) return done;
    if (Status done = launch(pass, {}); !done.ok()) return done;
    return there_.download();
  }

  Result<double> sample(BenchPass pass, int repeats, WarmRun warm) override {
    const ReplayCounts counts = replay_counts(repeats, warm);
    std::unique_ptr<Replay>& replay = replays_[{pass, counts.calls}];
    if (replay == nullptr) {
      Result<std::unique_ptr<Replay>> captured = Replay::capture(
          device_, counts.calls, [this, pass](Stream stream) { return launch(pass, stream); });
      if (!captured.ok()) return captured.status();
      replay = std::move(*captured);
    }
    const Result<double> seconds = replay->seconds(counts.replays, counts.uncounted);
    if (!seconds.ok()) return seconds.status();
    return *seconds * repeats / counts.runs();
  }

  std::optional<int64_t> memory_bytes(BenchPass pass) override {
    return static_cast<int64_t>(plan_.workspace_bytes(operator_pass(pass)));
  }

 private:
  Status launch(BenchPass pass, Stream stream) {
    if (pass == BenchPass::kForward) {
      return plan_.forward(there_.forward(), workspace_.view(), stream);
    }
    return plan_.backward(there_.backward(), workspace_.view(), stream);
  }

  Plan plan_;
  int device_;
  harness::DeviceTensors there_;
  harness::DeviceWorkspace workspace_;
  std::map<std::pair<BenchPass, int>, std::unique_ptr<Replay>> replays_;  // by calls in the graph
};

}  // namespace

Result<std::unique_ptr<Contender>> open_cuda_contender(const Plan& plan,
                                                       harness::CaseTensors& tensors, Device device,
                                                       bool backward) {
  const size_t forward_bytes = plan.workspace_bytes(Pass::kForward);
  const size_t bytes =
      backward ? std::max(forward_bytes, plan.workspace_bytes(Pass::kBackward)) : forward_bytes;
  auto contender = std::make_unique<CudaContender>(plan, tensors, device.index, bytes);
  if (Status done = contender->reserve(); !done.ok()) return done;
  return std::unique_ptr<Contender>(std::move(contender));
}

std::string cuda_bus_id(Device device) {
  char id[32] = "";
  if (cudaDeviceGetPCIBusId(id, sizeof id, device.index) != cudaSuccess) {
    (void)cudaGetLastError();
    return {};
  }
  return id;
}

}  // namespace fovea::cli
