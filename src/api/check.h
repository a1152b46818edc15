// Whether a request is right, before anything is written: the problem of a plan, and the tensors
// and workspace of a call against the plan's problem. Nothing here allocates unless it refuses.
#pragma once

#include <cstddef>

#include "fovea/plan.h"

namespace fovea {

Status check_problem(const AttentionProblem& problem);

// `problem` has passed check_problem; `device` is the one it was planned for.
Status check_forward(const AttentionProblem& problem, Device device, const ForwardTensors& t);
Status check_backward(const AttentionProblem& problem, Device device, const BackwardTensors& t);

Status check_workspace(const char* call, Workspace workspace, size_t needed);

}  // namespace fovea
