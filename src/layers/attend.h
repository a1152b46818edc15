// The attention operator as a step of a layer: its plan, its memory, its optional inputs.
#pragma once

#include "layers/engine.h"
#include "layers/memory.h"

namespace fovea::layers {

// Tensors of the operator inside a layer, [batch, rows, heads, dim].
struct AttendTensors {
  TensorView q, k, v, out;
};
struct AttendGradients {
  TensorView dout, dq, dk, dv;
};

// When the operator works in either pass of a layer.
struct AttendLives {
  Life forward, backward;
};

class Attend {
 public:
  // The problem without features: they follow from the rest. kCached: kv_len is the cache's room,
  // and how much of it is filled comes with each call.
  static Result<Attend> make(AttentionProblem problem, Position position, const LayerShape& shape,
                             Device device, const PlanOptions& options, const AttendLives& lives,
                             MemoryPlan& memory);

  const Plan& plan() const { return *plan_; }
  // Not given where none is kept.
  TensorView lse_at(const Memory& memory) const {
    return lse_.made() ? memory.at(lse_) : TensorView{};
  }

  void forward(Run& run, const LayerEngine& engine, const Memory& memory, const LayerInputs& in,
               const AttendTensors& t, int64_t filled) const;
  void backward(Run& run, const LayerEngine& engine, const Memory& memory, const LayerInputs& in,
                const AttendTensors& t, const AttendGradients& g) const;

 private:
  Attend() = default;
  void fill_inputs(Run& run, const LayerEngine& engine, const LayerInputs& in,
                   const AttendTensors& t, const TensorView& slopes, AttentionInputs& to) const;

  std::optional<Plan> plan_;
  Slot lse_;        // saved
  Slot lengths_;    // [batch] i32, with a cache
  Slot slopes_[2];  // [head_q], with ALiBi; forward, backward
  Slot forward_work_, backward_work_;
};

}  // namespace fovea::layers
