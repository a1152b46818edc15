// The steps that every layer is made with.
#include "layers/layer.h"

#include "plan/device.h"

namespace fovea::layers {

Status LayerParts::make_steps(const LayerShape& with, DType type, int64_t room, Device on,
                              const PlanOptions& options, EngineNeeds needs) {
  needs.plain_sums =
      options.backend == reference_backend().name() && options.arithmetic == Arithmetic::kPlain;
  shape = with_kv_len(with);
  device = on;
  dtype = type;
  max_seq_len = room;
  memory = MemoryPlan(shape.use, on);
  const Result<DeviceInfo> info = discover(on, options);
  if (!info.ok()) return info.status();
  auto made = make_engine(*info, type, needs);
  if (!made.ok()) return made.status();
  engine = std::move(made).value();
  return {};
}

void LayerParts::make_scratch() {
  forward_scratch = memory.forward_bytes({engine->scratch_bytes(), {}});
  backward_scratch = memory.backward_bytes({engine->scratch_bytes(), {}});
}

void LayerParts::lend(int64_t width, int out_until, int dquery_until) {
  if (!shape.lends) return;
  const int64_t bytes = shape.batch * shape.q_len * width * dtype_bytes(dtype);
  memory.lend(Room::kOut, bytes, out_until);
  memory.lend(Room::kDquery, bytes, dquery_until);
}

void LayerParts::lend_weights(int64_t width, int64_t projected, int64_t heads) {
  if (!shape.lends) return;
  memory.lend(Room::kDprojection, projected * width * dtype_bytes(dtype), kProjectBack);
  memory.lend(Room::kDoutput, width * heads * dtype_bytes(dtype), kOutputWeightBack);
}

Status LayerParts::make_attend(AttentionProblem problem, Position position,
                               const PlanOptions& options, const AttendLives& lives) {
  Result<Attend> made = Attend::make(problem, position, shape, device, options, lives, memory);
  if (!made.ok()) return made.status();
  attend = std::move(made).value();
  return {};
}

}  // namespace fovea::layers
