// Plain arguments of one call, taken from the problem and its tensors.
#pragma once

#include "backend/cpu/arguments.h"

namespace fovea::cpu {

// Sizes and options alone: what scratch sizes depend on.
Arguments arguments_of(const AttentionProblem& problem);

Arguments arguments_of(const AttentionProblem& problem, const ForwardTensors& tensors);
Arguments arguments_of(const AttentionProblem& problem, const BackwardTensors& tensors);

RowScalars row_scalars(const TensorView& t);  // lse and its kin; data is null when not given
Broadcast broadcast_strides(const TensorView& t);

}  // namespace fovea::cpu
