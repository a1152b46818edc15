// A layer of any kind behind one interface: the plan of a layer's case, called on its tensors.
#pragma once

#include <memory>

#include "harness/layer_tensors.h"

namespace fovea::harness {

class AnyLayer {
 public:
  virtual ~AnyLayer() = default;
  virtual const Plan& attention() const = 0;
  virtual size_t workspace_bytes(Pass pass) const = 0;
  virtual size_t saved_bytes() const = 0;
  virtual Status forward(const LayerViews& views, Workspace workspace, Saved saved,
                         Stream stream) const = 0;
  virtual Status backward(const LayerViews& views, Workspace workspace, Saved saved,
                          Stream stream) const = 0;
};

Result<std::unique_ptr<AnyLayer>> make_any_layer(const LayerCase& c, LayerUse use, Device device,
                                                 const PlanOptions& plan = {});

}  // namespace fovea::harness
