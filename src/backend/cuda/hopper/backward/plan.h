// Which backward problems get the Hopper engine's kernel, and how they are cut: host arithmetic.
#pragma once

#include "backend/backend.h"
#include "backend/cuda/hopper/backward/kernels.h"
#include "backend/cuda/portable/backward/config.h"

namespace fovea::cuda::hopper {

// Of a problem that the engine does not refuse; null where the portable engine's kernels are taken.
const BackwardKernel* find_backward(const AttentionProblem& p, const GpuInfo& gpu);

// Its blocks as the portable engine knows its own, which cuts the rows of their keys into parts.
cuda::BackwardConfig blocks_of(const BackwardConfig& c, const AttentionProblem& p,
                               const GpuInfo& gpu);

}  // namespace fovea::cuda::hopper
