// How a pass is cut into tasks for threads.
#pragma once

#include "backend/cpu/kernels.h"
#include "fovea/attention.h"

namespace fovea::cpu {

// Each KV head's rows into chunks, and its keys into parts when the chunks alone would leave
// threads idle.
struct ForwardCut {
  int64_t rows = 0;    // of a chunk
  int64_t chunks = 0;  // of a KV head
  int64_t parts = 1;
  int64_t keys = 0;  // of a part
};
ForwardCut cut_forward(const AttentionProblem& p, const KernelSizes& sizes, int threads);

// Each KV head's query heads into parts, each with its own sums of dk and dv; where those are too
// few for the threads, its keys too, each part with its own sum of dq.
struct BackwardCut {
  int64_t head_parts = 1;
  int64_t heads = 1;  // query heads of a part
  int64_t key_parts = 1;
  int64_t keys = 0;  // of a part
};
BackwardCut cut_backward(const AttentionProblem& p, const KernelSizes& sizes, int threads);

}  // namespace fovea::cpu
