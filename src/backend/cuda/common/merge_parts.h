// Joins the parts of a forward pass that was cut over the keys.
#pragma once

#include <cuda_runtime_api.h>

#include "backend/cuda/common/parts.h"

namespace fovea::cuda {

// T: of out; float, ptx::TensorFloat, __half or __nv_bfloat16.
template <typename T>
cudaError_t merge_parts(const MergePartsArguments& a, cudaStream_t stream);

}  // namespace fovea::cuda
