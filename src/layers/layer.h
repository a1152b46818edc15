// What every layer is built of, and what LayerPlan holds.
#pragma once

#include <optional>

#include "layers/attend.h"
#include "layers/check_call.h"
#include "layers/check_options.h"

namespace fovea::layers {

struct LayerParts {
  LayerShape shape;  // kv_len filled in
  Device device;
  DType dtype = DType::kF32;
  int64_t max_seq_len = 0;
  MemoryPlan memory;
  std::unique_ptr<const LayerEngine> engine;
  std::optional<Attend> attend;
  Slot forward_scratch, backward_scratch;  // the engine's

  // The engine and its scratch; after it, memory and attend.
  Status make_steps(const LayerShape& with, DType type, int64_t room, Device on,
                    const PlanOptions& options, const EngineNeeds& needs);
  Status make_attend(AttentionProblem problem, Position position, const PlanOptions& options);

  bool cached() const { return shape.use == LayerUse::kCached; }
  bool training() const { return shape.use == LayerUse::kTraining; }
};

}  // namespace fovea::layers

namespace fovea {

// A layer whose weights are a Weights. Calls have been checked for memory; the layer checks
// tensors.
template <typename Weights>
class LayerPlan<Weights>::Impl : public layers::LayerParts {
 public:
  virtual ~Impl() = default;
  virtual Status check_forward(const LayerForward<Weights>& call,
                               layers::CallCheck& check) const = 0;
  virtual Status check_backward(const LayerBackward<Weights>& call,
                                layers::CallCheck& check) const = 0;
  virtual void forward(layers::Run& run, const layers::Memory& at,
                       const LayerForward<Weights>& call) const = 0;
  virtual void backward(layers::Run& run, const layers::Memory& at,
                        const LayerBackward<Weights>& call) const = 0;
  // An empty cache whose views have no memory yet.
  virtual LayerCache cache_views() const = 0;
};

}  // namespace fovea
