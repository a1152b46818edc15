// A layer of this library as a contender, on the CPU.
#pragma once

#include <optional>

#include "cli/contender.h"
#include "harness/any_layer.h"

namespace fovea::cli {

// The layer of a case, planned for the passes that the case asks for: what is to be trained keeps
// what its backward reads, forward alone does not.
class PlannedLayer {
 public:
  static Result<PlannedLayer> make(const harness::LayerCase& c, Device device,
                                   const PlanOptions& options);

  const Plan& attention() const;
  size_t workspace_bytes() const;        // that any pass needs
  size_t saved_bytes() const;            // that any pass needs
  int64_t extra_bytes(BenchPass) const;  // beyond inputs and outputs, of one pass
  Status run(BenchPass pass, const harness::LayerViews& views, Workspace workspace, Saved saved,
             Stream stream) const;

 private:
  std::shared_ptr<const harness::AnyLayer> inference_;  // null: not asked for
  std::shared_ptr<const harness::AnyLayer> training_;
};

// The views that outputs for a check are made from (LayerViews::sampled_dout).
harness::LayerViews views_of_check(const harness::LayerViews& views);

// The tensors must outlive it.
class LayerContender : public Contender {
 public:
  LayerContender(PlannedLayer layer, harness::LayerTensors& tensors);

  std::string impl() const override { return "fovea-" + layer_.attention().backend(); }
  std::string kernel() const override { return layer_.attention().kernel(); }
  Result<double> sample(BenchPass pass, int repeats, WarmRun warm) override;
  Status produce(BenchPass pass) override;
  bool gives_lse() const override { return false; }
  std::optional<int64_t> memory_bytes(BenchPass pass) override { return layer_.extra_bytes(pass); }

 private:
  Status run(BenchPass pass, const harness::LayerViews& views);

  PlannedLayer layer_;
  harness::LayerTensors& tensors_;
  harness::OwnedWorkspace workspace_;
  harness::OwnedWorkspace saved_;
};

}  // namespace fovea::cli
