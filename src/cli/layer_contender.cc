// Plans of a layer, and their calls.
#include "cli/layer_contender.h"

#include <algorithm>
#include <chrono>

namespace fovea::cli {

using harness::AnyLayer;
using harness::LayerViews;

Result<PlannedLayer> PlannedLayer::make(const harness::LayerCase& c, Device device,
                                        const PlanOptions& options) {
  PlannedLayer planned;
  const auto plan = [&](bool wanted, LayerUse use, std::shared_ptr<const AnyLayer>& out) -> Status {
    if (!wanted) return {};
    Result<std::unique_ptr<AnyLayer>> made = harness::make_any_layer(c, use, device, options);
    if (made.ok()) out = std::move(*made);
    return made.status();
  };
  if (Status s = plan(c.forward, LayerUse::kInference, planned.inference_); !s.ok()) return s;
  if (Status s = plan(c.training, LayerUse::kTraining, planned.training_); !s.ok()) return s;
  return planned;
}

const Plan& PlannedLayer::attention() const {
  return (inference_ != nullptr ? inference_ : training_)->attention();
}

size_t PlannedLayer::workspace_bytes() const {
  size_t bytes = inference_ != nullptr ? inference_->workspace_bytes(Pass::kForward) : 0;
  if (training_ != nullptr) {
    for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
      bytes = std::max(bytes, training_->workspace_bytes(pass));
    }
  }
  return bytes;
}

size_t PlannedLayer::saved_bytes() const {
  return training_ != nullptr ? training_->saved_bytes() : 0;
}

int64_t PlannedLayer::extra_bytes(BenchPass pass) const {
  if (pass == BenchPass::kForward) {
    return static_cast<int64_t>(inference_->workspace_bytes(Pass::kForward));
  }
  const size_t workspace = std::max(training_->workspace_bytes(Pass::kForward),
                                    training_->workspace_bytes(Pass::kBackward));
  return static_cast<int64_t>(training_->saved_bytes() + workspace);
}

Status PlannedLayer::run(BenchPass pass, const LayerViews& views, Workspace workspace, Saved saved,
                         Stream stream) const {
  if (pass == BenchPass::kForward) return inference_->forward(views, workspace, {}, stream);
  if (Status s = training_->forward(views, workspace, saved, stream); !s.ok()) return s;
  return training_->backward(views, workspace, saved, stream);
}

LayerViews views_of_check(const LayerViews& views) {
  LayerViews checked = views;
  checked.dout = views.sampled_dout;
  return checked;
}

LayerContender::LayerContender(PlannedLayer layer, harness::LayerTensors& tensors)
    : layer_(std::move(layer)),
      tensors_(tensors),
      workspace_(layer_.workspace_bytes()),
      saved_(layer_.saved_bytes()) {}

Status LayerContender::run(BenchPass pass, const LayerViews& views) {
  const Workspace saved = saved_.view();
  return layer_.run(pass, views, workspace_.view(), {saved.data, saved.bytes}, {});
}

Status LayerContender::produce(BenchPass pass) {
  return run(pass, views_of_check(tensors_.views()));
}

Result<double> LayerContender::sample(BenchPass pass, int repeats, WarmRun warm) {
  const LayerViews& views = tensors_.views();
  if (warm == WarmRun::kUncounted) {
    if (Status done = run(pass, views); !done.ok()) return done;
  }
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < repeats; ++i) {
    if (Status done = run(pass, views); !done.ok()) return done;
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace fovea::cli
