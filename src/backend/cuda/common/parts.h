// Sums over parts of the keys, where a forward pass is cut over them.
#pragma once

#include <vector_types.h>

#include "backend/cuda/common/problem.h"

namespace fovea::cuda {

// Unnormalised. Rows of a KV head are numbered through the query heads of its group, head-major.
struct Parts {
  int count;
  float* sums;    // [part][batch * head_kv][group * q_len][dim_v]
  float2* stats;  // [part][batch * head_kv][group * q_len]: reference (log2), sum of weights

  // `rows`: batch * head_q * q_len.
  static constexpr int64_t bytes(int64_t count, int64_t rows, int64_t dim_v) {
    return count * rows * (dim_v + 2) * int64_t{sizeof(float)};
  }
  static Parts in(void* workspace, int64_t count, int64_t rows) {
    auto* const stats = static_cast<float2*>(workspace);
    return {static_cast<int>(count), reinterpret_cast<float*>(stats + count * rows), stats};
  }
};

struct MergePartsArguments {
  Problem p;
  int batch;
  Parts parts;
  Rows out;
  RowScalars lse;  // data may be null
};

}  // namespace fovea::cuda
