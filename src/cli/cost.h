// What a problem costs at least: operations and bytes, as the benchmark counts them.
#pragma once

#include <cstdint>

#include "fovea/plan.h"

namespace fovea::cli {

// Pairs of query and key that the mask by position lets meet, over all batch members and query
// heads. A boolean mask, a bias and dropout are not looked into: no engine here skips by them.
double visible_pairs(const AttentionProblem& problem, const AttentionInputs& inputs);

// Multiply and add counted apart: 2 * pairs * (dim_qk + dim_v) forward. The backward has five
// products of that size where the forward has two: 2.5 times as many.
double flops(const AttentionProblem& problem, double pairs, Pass pass);

// Every input read once and every output written once.
double minimal_bytes(const ForwardTensors& tensors);
double minimal_bytes(const BackwardTensors& tensors);

}  // namespace fovea::cli
