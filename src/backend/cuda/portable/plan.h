// Which kernels a problem gets from the portable engine and how its work is cut among blocks: host
// arithmetic.
#pragma once

#include "backend/backend.h"
#include "backend/cuda/portable/backward/kernels.h"
#include "backend/cuda/portable/forward/kernels.h"
#include "base/ceil_div.h"

namespace fovea::cuda {

// Null where no instance holds the head dims.
const ForwardKernel* find_forward(const AttentionProblem& p, const GpuInfo& gpu);
const BackwardKernel* find_backward(const AttentionProblem& p, const GpuInfo& gpu);

// Keys are cut into parts when rows alone would leave the GPU idle.
struct ForwardCut {
  int64_t tiles = 0;  // of rows, a KV head
  int64_t parts = 1;
  int64_t part_keys = 0;
  bool longest_first = false;
};

ForwardCut cut_forward(const AttentionProblem& p, const ForwardConfig& c, const GpuInfo& gpu);

// One pass for all gradients adds to sums in the workspace; not where its tiles do not fit the
// shared memory.
struct BackwardCut {
  bool one_pass = false;
  int64_t row_parts = 1;  // that the rows of a tile of keys are cut into, at most
  EvenParts even{};
  bool first_keys_first = false;
  bool long_tiles = false;  // of rows
  bool keys_begin_early = false;
  int64_t query_sum_rows = 0, key_sum_rows = 0;
  int64_t turns = 0;        // counts by which blocks add in one order; 0: they do in any
  bool one_launch = false;  // of a call whose tensors suit it
};

BackwardCut cut_backward(const AttentionProblem& p, const BackwardConfig& c, const GpuInfo& gpu);

// What a call's arguments hold that does not depend on its tensors.
ForwardArguments plan_forward(const AttentionProblem& p, const ForwardConfig& c,
                              const ForwardCut& cut, const GpuInfo& gpu);
BackwardArguments plan_backward(const AttentionProblem& p, const BackwardCut& cut,
                                const GpuInfo& gpu);

}  // namespace fovea::cuda
