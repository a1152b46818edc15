// torch's own op for attention by kernels of others, on the CPU and on GPUs. torch has a gradient
// for it and no kernel: a call through it is recorded, and differentiated, without Python.
#include <stdexcept>
#include <string>
#include <vector>

#include "attention_call.h"
#include "ops.h"

namespace fovea::torch_ops {
namespace {

// What both passes are told about q, k and v, [batch, head, seq, dim], that were read.
void set_problem(AttentionRequest& r, double dropout, bool is_causal, std::optional<double> scale) {
  if (dropout != 0) {
    throw std::runtime_error(
        "fovea: dropout_p is " + std::to_string(dropout) +
        ", must be 0 in aten::_scaled_dot_product_fused_attention_overrideable");
  }
  r.order = Order::kHeadsFirst;
  r.problem.mask.right = is_causal ? 0 : Mask::kUnbounded;
  r.problem.scale = scale;
  r.options.threads = thread_count();
}

}  // namespace

void overrideable(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  AttentionRequest r;
  for (Viewed* tensor : {&r.q, &r.k, &r.v}) tensor->tensor = arguments.take<Tensor>();
  r.bias.tensor = arguments.take<std::optional<Tensor>>();
  const auto dropout = arguments.take<double>();
  const auto is_causal = arguments.take<bool>();
  arguments.take<bool>();  // return_debug_mask: there is none
  const auto scale = arguments.take<std::optional<double>>();
  set_problem(r, dropout, is_causal, scale);
  const AttentionResults results = run_attention(r, true);
  // cum_seq_q, cum_seq_k, max_q, max_k, philox_seed, philox_offset and debug_attn_mask: nothing.
  const Tensor none;
  const int64_t zero = 0;
  give_back(stack, results.out, *results.lse, none, none, zero, zero, none, none, none);
}

void overrideable_backward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  AttentionRequest r;
  AttentionGradientRequest g;
  g.dout.tensor = arguments.take<Tensor>();
  for (Viewed* tensor : {&r.q, &r.k, &r.v}) tensor->tensor = arguments.take<Tensor>();
  auto bias = arguments.take<Tensor>();
  const auto wanted = arguments.take<std::vector<bool>>();  // of q, k, v and bias
  g.out.tensor = arguments.take<Tensor>();
  g.lse.tensor = arguments.take<Tensor>();
  for (int i = 0; i < 2; ++i) arguments.take<Tensor>();   // cum_seq_q, cum_seq_k
  for (int i = 0; i < 2; ++i) arguments.take<int64_t>();  // max_q, max_k
  const auto dropout = arguments.take<double>();
  const auto is_causal = arguments.take<bool>();
  for (int i = 0; i < 2; ++i) arguments.take<Tensor>();  // philox_seed, philox_offset
  const auto scale = arguments.take<std::optional<double>>();
  set_problem(r, dropout, is_causal, scale);
  if (bias.defined()) r.bias.tensor = std::move(bias);
  g.want_dbias = wanted.at(3);
  const AttentionGradients d = run_attention_backward(r, g);
  give_back(stack, d.dq, d.dk, d.dv, d.dbias ? *d.dbias : Tensor());
}

}  // namespace fovea::torch_ops
