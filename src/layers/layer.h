// What every layer is built of, and what LayerPlan holds.
#pragma once

#include <optional>

#include "layers/attend.h"
#include "layers/check_call.h"
#include "layers/check_options.h"
#include "layers/self_inputs.h"

namespace fovea::layers {

// The steps of the classic layers' passes.
enum ForwardStep { kProject, kAttend, kOutput };
enum BackwardStep { kOutputBack, kAttendBack, kProjectBack, kOutputWeightBack };

struct LayerParts {
  LayerShape shape;  // kv_len filled in
  Device device;
  DType dtype = DType::kF32;
  int64_t max_seq_len = 0;
  MemoryPlan memory;
  std::unique_ptr<const LayerEngine> engine;
  std::optional<Attend> attend;
  Slot forward_scratch, backward_scratch;  // of an engine that has one for all steps

  // The engine; after it, memory and attend.
  Status make_steps(const LayerShape& with, DType type, int64_t room, Device on,
                    const PlanOptions& options, EngineNeeds needs);
  Status make_attend(AttentionProblem problem, Position position, const PlanOptions& options,
                     const AttendLives& lives);
  // One scratch for all steps.
  void make_scratch();
  // Where results are lent: out and dquery, of `width` channels, until the steps that write them.
  void lend(int64_t width, int out_until, int dquery_until);
  // And gradients of the classic layers' weights, [projected, width] and [width, heads]; the latter
  // is made last, when what lies there has been read.
  void lend_weights(int64_t width, int64_t projected, int64_t heads);

  bool cached() const { return shape.use == LayerUse::kCached; }
  bool training() const { return shape.use == LayerUse::kTraining; }
};

}  // namespace fovea::layers

namespace fovea {

// A layer whose weights are a Weights. The plan checks a call by what the layer says of its
// tensors, and only then runs it.
template <typename Weights>
class LayerPlan<Weights>::Impl : public layers::LayerParts {
 public:
  using Made = LayerPlan<Weights>;

  virtual ~Impl() = default;
  virtual layers::RowDims query_dims() const = 0;  // of query, out and their gradients
  virtual void check_inputs(layers::CallCheck& check, const LayerInputs& in) const = 0;
  virtual void check_weights(layers::CallCheck& check, layers::CallCheck::Weights kind,
                             const Weights& weights) const = 0;
  // Those of key and value; here of a layer that attends to query itself.
  virtual void check_input_gradients(layers::CallCheck& check,
                                     const LayerBackward<Weights>& call) const {
    layers::check_no_key_gradients(check, call.dkey, call.dvalue);
  }
  virtual void forward(layers::Run& run, const layers::Memory& at,
                       const LayerForward<Weights>& call) const = 0;
  virtual void backward(layers::Run& run, const layers::Memory& at,
                        const LayerBackward<Weights>& call) const = 0;
  // An empty cache whose views have no memory yet.
  virtual LayerCache cache_views() const = 0;
};

namespace layers {

// A layer by the arguments of its make, with a place for all that it asked for.
template <typename Layer, typename... Arguments>
Result<typename Layer::Made> made_layer(const Arguments&... arguments) {
  auto layer = std::make_shared<Layer>();
  if (Status s = layer->make(arguments...); !s.ok()) return s;
  layer->memory.place(layer->shape.spends);
  return typename Layer::Made(std::move(layer));
}

}  // namespace layers
}  // namespace fovea
