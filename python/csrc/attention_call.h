// One call of attention: what it is told, and the two passes over it. The ops read their arguments
// into a request and give back what the passes return.
#pragma once

#include "torch_tensor.h"

namespace fovea::torch_ops {

struct AttentionRequest {
  Viewed q, k, v;
  Viewed bias, mask, key_lengths, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_kv;
  std::optional<Tensor> dropout_seed;
  Order order = Order::kRowsFirst;  // of q, k, v, out and their gradients
  AttentionProblem problem;         // its sizes, features and layout follow from the tensors
  PlanOptions options;
};

struct AttentionResults {
  Tensor out;
  std::optional<Tensor> lse;  // where it is wanted
};

AttentionResults run_attention(AttentionRequest& r, bool with_lse);

// What a backward pass is told besides.
struct AttentionGradientRequest {
  Viewed dout, dlse, out, lse;
  bool want_dbias = false, want_dsink = false;
};

struct AttentionGradients {
  Tensor dq, dk, dv;
  std::optional<Tensor> dbias, dsink;  // where they are wanted, and their inputs given
};

AttentionGradients run_attention_backward(AttentionRequest& r, AttentionGradientRequest& g);

}  // namespace fovea::torch_ops
