// Runs a layer on copies of a case's tensors in a GPU's memory.
#include "cli/cuda/layer_contender.h"

#include <map>
#include <utility>

#include "cli/cuda/replay.h"
#include "cli/timing.h"
#include "harness/device_tensors.h"

namespace fovea::cli {
namespace {

class CudaLayerContender : public Contender {
 public:
  CudaLayerContender(PlannedLayer layer, harness::LayerTensors& tensors, int device)
      : layer_(std::move(layer)),
        device_(device),
        copies_(tensors.buffers(), device),
        tensors_(tensors),
        workspace_(layer_.workspace_bytes(), device),
        saved_(layer_.saved_bytes(), device) {}

  Status reserve() {
    if (Status done = workspace_.fill(harness::kPoisonByte); !done.ok()) return done;
    if (Status done = saved_.fill(harness::kPoisonByte); !done.ok()) return done;
    if (Status done = copies_.upload(); !done.ok()) return done;
    there_ = tensors_.views();
    there_.for_each([this](TensorView& view) { view = copies_.there(view); });
    return {};
  }

  std::string impl() const override { return "fovea-" + layer_.attention().backend(); }
  std::string kernel() const override { return layer_.attention().kernel(); }
  const char* timing(BenchPass) const override { return "graph"; }
  bool gives_lse() const override { return false; }
  std::optional<int64_t> memory_bytes(BenchPass pass) override { return layer_.extra_bytes(pass); }

  Status produce(BenchPass pass) override {
    if (Status done = copies_.upload(); !done.ok()) return done;  // with it the poison of outputs
    if (Status done = launch(pass, views_of_check(there_), {}); !done.ok()) return done;
    return copies_.download();
  }

  Result<double> sample(BenchPass pass, int repeats, WarmRun warm) override {
    const ReplayCounts counts = replay_counts(repeats, warm);
    std::unique_ptr<Replay>& replay = replays_[{pass, counts.calls}];
    if (replay == nullptr) {
      Result<std::unique_ptr<Replay>> captured =
          Replay::capture(device_, counts.calls,
                          [this, pass](Stream stream) { return launch(pass, there_, stream); });
      if (!captured.ok()) return captured.status();
      replay = std::move(*captured);
    }
    const Result<double> seconds = replay->seconds(counts.replays, counts.uncounted);
    if (!seconds.ok()) return seconds.status();
    return *seconds * repeats / counts.runs();
  }

 private:
  Status launch(BenchPass pass, const harness::LayerViews& views, Stream stream) {
    const Workspace saved = saved_.view();
    return layer_.run(pass, views, workspace_.view(), {saved.data, saved.bytes}, stream);
  }

  PlannedLayer layer_;
  int device_;
  harness::DeviceCopies copies_;
  harness::LayerTensors& tensors_;
  harness::LayerViews there_;
  harness::DeviceWorkspace workspace_;
  harness::DeviceWorkspace saved_;
  std::map<std::pair<BenchPass, int>, std::unique_ptr<Replay>> replays_;  // by calls in the graph
};

}  // namespace

Result<std::unique_ptr<Contender>> open_cuda_layer(const PlannedLayer& layer,
                                                   harness::LayerTensors& tensors, Device device) {
  auto contender = std::make_unique<CudaLayerContender>(layer, tensors, device.index);
  if (Status done = contender->reserve(); !done.ok()) return done;
  return std::unique_ptr<Contender>(std::move(contender));
}

}  // namespace fovea::cli
