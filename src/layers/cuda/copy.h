// Copies of rows, several in one launch; and small vectors that a layer fills itself.
#pragma once

#include <cuda_runtime_api.h>

#include "layers/cuda/head_rows.h"

namespace fovea::layers::cuda {

struct CopyRows {
  HeadRows from;  // its data is null: zeros
  HeadRows to;
};

struct CopyArguments {
  static constexpr int kMost = 4;
  CopyRows copies[kMost];
  int count = 0;
  int word_bytes = 0;  // that all of them can be moved by: 2, 4, 8 or 16; all sizes are in words
};

cudaError_t launch_copy(const CopyArguments& a, cudaStream_t stream);

cudaError_t launch_fill_lengths(int32_t* to, int64_t count, int32_t length, cudaStream_t stream);
// The usual geometric slopes of ALiBi.
cudaError_t launch_fill_alibi_slopes(float* to, int64_t heads, cudaStream_t stream);

}  // namespace fovea::layers::cuda
