// From the tensors of a call to what kernels are handed.
#pragma once

#include "backend/cuda/common/problem.h"
#include "fovea/attention.h"

namespace fovea::cuda {

Rows rows_of(const TensorView& t);
RowScalars scalars_of(const TensorView& t);  // null where it is not given
Broadcast broadcast_of(const TensorView& t);
Problem problem_of(const AttentionProblem& p, const AttentionInputs& t);

// Whether rows begin on 16 bytes and hold whole 16-byte pieces.
bool takes_vectors(const TensorView& t);

}  // namespace fovea::cuda
