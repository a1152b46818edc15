// Which kernel a forward problem gets and in which order its tiles are worked on: host arithmetic.
#pragma once

#include "backend/backend.h"
#include "backend/cuda/hopper/forward/kernels.h"

namespace fovea::cuda::hopper {

struct ForwardPlan {
  const ForwardKernel* kernel = nullptr;  // null: no instance holds the head dims
  int row_tiles = 0;                      // of a head
  int section_heads = 1;
  int parts = 1;      // that keys are cut into
  int part_keys = 0;  // of a part
  int blocks = 0;
  bool ticket = false;  // tiles are claimed, not known in advance
  bool turns = true;
};

ForwardPlan plan_forward(const AttentionProblem& p, const GpuInfo& gpu);

}  // namespace fovea::cuda::hopper
