// torch's own ops for attention, where torch has a gradient for them and no kernel: a call through
// one is recorded, and differentiated, without Python. On the CPU that is the op for kernels of
// others; on GPUs the one that torch has for CPUs, which takes less and is called in less time.
#include <stdexcept>
#include <string>
#include <vector>

#include "attention_call.h"
#include "ops.h"

namespace fovea::torch_ops {
namespace {

// What is told about q, k and v, [batch, head, seq, dim], in either op and either pass.
struct Told {
  double dropout = 0;
  bool is_causal = false;
  std::optional<double> scale;
};

void take_qkv(Arguments& arguments, AttentionRequest& r) {
  for (Viewed* tensor : {&r.q, &r.k, &r.v}) tensor->tensor = arguments.take<Tensor>();
}

// For a backward pass torch has kept a tensor of nothing where none was given.
void take_bias(Arguments& arguments, AttentionRequest& r) {
  auto bias = arguments.take<std::optional<Tensor>>();
  if (bias && bias->defined()) r.bias.tensor = std::move(bias);
}

// After the last argument was read, for it may throw.
void set_problem(AttentionRequest& r, const Told& told) {
  if (told.dropout != 0) {
    throw std::runtime_error("fovea: dropout_p is " + std::to_string(told.dropout) +
                             ", must be 0 in attention that torch records");
  }
  r.order = Order::kHeadsFirst;
  r.problem.mask.right = told.is_causal ? 0 : Mask::kUnbounded;
  r.problem.scale = told.scale;
  r.options.threads = thread_count();
}

}  // namespace

void overrideable(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  AttentionRequest r;
  Told told;
  take_qkv(arguments, r);
  take_bias(arguments, r);
  told.dropout = arguments.take<double>();
  told.is_causal = arguments.take<bool>();
  arguments.take<bool>();  // return_debug_mask: there is none
  told.scale = arguments.take<std::optional<double>>();
  set_problem(r, told);
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
  Told told;
  g.dout.tensor = arguments.take<Tensor>();
  take_qkv(arguments, r);
  auto bias = arguments.take<Tensor>();
  const auto wanted = arguments.take<std::vector<bool>>();  // of q, k, v and bias
  g.out.tensor = arguments.take<Tensor>();
  g.lse.tensor = arguments.take<Tensor>();
  for (int i = 0; i < 2; ++i) arguments.take<Tensor>();   // cum_seq_q, cum_seq_k
  for (int i = 0; i < 2; ++i) arguments.take<int64_t>();  // max_q, max_k
  told.dropout = arguments.take<double>();
  told.is_causal = arguments.take<bool>();
  for (int i = 0; i < 2; ++i) arguments.take<Tensor>();  // philox_seed, philox_offset
  told.scale = arguments.take<std::optional<double>>();
  set_problem(r, told);
  if (bias.defined()) r.bias.tensor = std::move(bias);
  g.want_dbias = wanted.at(3);
  const AttentionGradients d = run_attention_backward(r, g);
  give_back(stack, d.dq, d.dk, d.dv, d.dbias ? *d.dbias : Tensor());
}

void flash_for_cpu(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  AttentionRequest r;
  Told told;
  take_qkv(arguments, r);
  told.dropout = arguments.take<double>();
  told.is_causal = arguments.take<bool>();
  take_bias(arguments, r);
  told.scale = arguments.take<std::optional<double>>();
  set_problem(r, told);
  const AttentionResults results = run_attention(r, true);
  give_back(stack, results.out, *results.lse);
}

// The bias has no gradient here, as in torch.
void flash_for_cpu_backward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  AttentionRequest r;
  AttentionGradientRequest g;
  Told told;
  g.dout.tensor = arguments.take<Tensor>();
  take_qkv(arguments, r);
  g.out.tensor = arguments.take<Tensor>();
  g.lse.tensor = arguments.take<Tensor>();
  told.dropout = arguments.take<double>();
  told.is_causal = arguments.take<bool>();
  take_bias(arguments, r);
  told.scale = arguments.take<std::optional<double>>();
  set_problem(r, told);
  const AttentionGradients d = run_attention_backward(r, g);
  give_back(stack, d.dq, d.dk, d.dv);
}

}  // namespace fovea::torch_ops
