// Calls of the operator's plan with a layer's tensors.
#include "layers/attend.h"

namespace fovea::layers {
namespace {

// [batch, keys] marks padding: the same for every head and query.
TensorView score_mask(const TensorView& mask) {
  if (mask.rank != 2) return mask;
  TensorView view = mask;
  view.rank = 4;
  view.sizes = {mask.sizes[0], 1, 1, mask.sizes[1]};
  view.strides = {mask.strides[0], 0, 0, mask.strides[1]};
  return view;
}

}  // namespace

Result<Attend> Attend::make(AttentionProblem problem, Position position, const LayerShape& shape,
                            Device device, const PlanOptions& options, const AttendLives& lives,
                            MemoryPlan& memory) {
  const DType wide = problem.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  const bool cached = shape.use == LayerUse::kCached, alibi = position == Position::kAlibi;
  if (shape.masked) problem.features = problem.features | Feature::kBoolMask;
  if (cached) problem.features = problem.features | Feature::kKeyLengths;
  if (alibi) problem.features = problem.features | Feature::kAlibi;
  Result<Plan> plan = make_plan(problem, device, options);
  if (!plan.ok()) return plan.status();
  Attend attend;
  attend.plan_ = *plan;
  if (shape.use == LayerUse::kTraining) {
    attend.lse_ =
        memory.saved(wide, {problem.batch, problem.head_q, problem.q_len}, {}, lives.backward.last);
  }
  if (cached) attend.lengths_ = memory.forward(DType::kI32, {problem.batch}, lives.forward);
  if (alibi) {
    attend.slopes_[0] = memory.forward(wide, {problem.head_q}, lives.forward);
    attend.slopes_[1] = memory.backward(wide, {problem.head_q}, lives.backward);
  }
  attend.forward_work_ =
      memory.forward_bytes({plan->workspace_bytes(Pass::kForward), lives.forward});
  attend.backward_work_ =
      memory.backward_bytes({plan->workspace_bytes(Pass::kBackward), lives.backward});
  return attend;
}

void Attend::fill_inputs(Run& run, const LayerEngine& engine, const LayerInputs& in,
                         const AttendTensors& t, const TensorView& slopes,
                         AttentionInputs& to) const {
  to.q = t.q;
  to.k = t.k;
  to.v = t.v;
  if (in.mask.given()) to.mask = score_mask(in.mask);
  to.dropout = in.dropout;
  if (!slopes.given()) return;
  engine.fill_alibi_slopes(run, slopes);
  to.alibi_slopes = slopes;
}

void Attend::forward(Run& run, const LayerEngine& engine, const Memory& memory,
                     const LayerInputs& in, const AttendTensors& t, int64_t filled) const {
  if (!run.status.ok()) return;
  ForwardTensors tensors;
  fill_inputs(run, engine, in, t, slopes_[0].made() ? memory.at(slopes_[0]) : TensorView{},
              tensors);
  tensors.out = t.out;
  tensors.lse = lse_at(memory);
  if (lengths_.made()) {
    tensors.key_lengths = memory.at(lengths_);
    engine.fill_lengths(run, filled, tensors.key_lengths);
  }
  const Scratch work = memory.scratch_at(forward_work_);
  run.note(plan_->forward(tensors, {work.data, work.bytes}, run.stream));
}

void Attend::backward(Run& run, const LayerEngine& engine, const Memory& memory,
                      const LayerInputs& in, const AttendTensors& t,
                      const AttendGradients& g) const {
  if (!run.status.ok()) return;
  BackwardTensors tensors;
  fill_inputs(run, engine, in, t, slopes_[1].made() ? memory.at(slopes_[1]) : TensorView{},
              tensors);
  tensors.out = t.out;
  tensors.lse = memory.at(lse_);
  tensors.dout = g.dout;
  tensors.dq = g.dq;
  tensors.dk = g.dk;
  tensors.dv = g.dv;
  const Scratch work = memory.scratch_at(backward_work_);
  run.note(plan_->backward(tensors, {work.data, work.bytes}, run.stream));
}

}  // namespace fovea::layers
