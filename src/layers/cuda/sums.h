// Sums over rows in two steps of fixed order: parts of the rows, then the parts.
#pragma once

#include <cuda_runtime_api.h>

#include "layers/cuda/head_rows.h"

namespace fovea::layers::cuda {

// sums [parts, dim] of the columns of one head.
cudaError_t launch_column_sums(const HeadRows& x, DType dtype, float* sums, int parts,
                               cudaStream_t stream);

// The sums of all parts, [parts, first.count + second.count], rounded; a result that is null is
// not written.
struct SumTo {
  void* data = nullptr;
  int64_t count = 0;
};
cudaError_t launch_sum_parts(const float* sums, int parts, SumTo first, SumTo second, DType dtype,
                             cudaStream_t stream);

// The heads of every row, summed into the one head of y.
cudaError_t launch_sum_heads(const HeadRows& x, const HeadRows& y, bool wide, DType dtype,
                             cudaStream_t stream);

}  // namespace fovea::layers::cuda
