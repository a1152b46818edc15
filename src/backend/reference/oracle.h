// The contract evaluated where a test asks, in two arithmetics: exactly (float64, never rounded
// back), and by the plain unfused formula in the problem's dtype, whose error is the yardstick of
// the 2x rule. Query rows and keys are sampled, so that large problems can be checked in a second.
//
//   GroupSample group{.b = 0, .head_kv = 3, .rows = {{.h = 12, .i = 0}, {.h = 13, .i = 511}}};
//   ForwardSample exact = sample_forward(Arithmetic::kExact, problem, tensors, group);
#pragma once

#include <cstdint>
#include <vector>

#include "fovea/plan.h"

namespace fovea::reference {

// Where the backward pass finds the softmax statistics of a row: computed from q, k and v at the
// price of a forward pass over the group, or taken from the call's out and lse.
enum class StatsFrom { kComputed, kGiven };

struct QueryRow {
  int64_t h = 0;  // query head, of the group's KV head
  int64_t i = 0;  // query inside its sequence
};

// Query rows and keys of one batch member and KV head.
struct GroupSample {
  int64_t b = 0;
  int64_t head_kv = 0;
  std::vector<QueryRow> rows;
  std::vector<int64_t> keys;  // rising
};

struct ForwardSample {
  std::vector<double> out;  // [rows, dim_v]
  std::vector<double> lse;  // [rows]
};
ForwardSample sample_forward(Arithmetic arithmetic, const AttentionProblem& problem,
                             const ForwardTensors& tensors, const GroupSample& group);

struct BackwardSample {
  std::vector<double> dq;  // [rows, dim_qk]
  std::vector<double> dk;  // [keys, dim_qk]
  std::vector<double> dv;  // [keys, dim_v]
};
BackwardSample sample_backward(Arithmetic arithmetic, const AttentionProblem& problem,
                               const BackwardTensors& tensors, const GroupSample& group,
                               StatsFrom stats);

// Rows (b, h, i) of dbias, each index 0 where the bias is broadcast: [rows, kv_len].
struct BiasRow {
  int64_t b = 0, h = 0, i = 0;
};
std::vector<double> sample_dbias(Arithmetic arithmetic, const AttentionProblem& problem,
                                 const BackwardTensors& tensors, const std::vector<BiasRow>& rows,
                                 StatsFrom stats);

// dsink of one query head.
double sample_dsink(Arithmetic arithmetic, const AttentionProblem& problem,
                    const BackwardTensors& tensors, int64_t h, StatsFrom stats);

}  // namespace fovea::reference
