// The ops fovea::attention, attention_no_grad and attention_backward.
#include <string>

#include "attention_call.h"
#include "ops.h"

namespace fovea::torch_ops {
namespace {

using Request = AttentionRequest;

void take_tensors(Arguments& arguments, Request& r) {
  for (Viewed* required : {&r.q, &r.k, &r.v}) required->tensor = arguments.take<Tensor>();
  for (Viewed* optional : {&r.bias, &r.mask, &r.key_lengths, &r.alibi_slopes, &r.sink,
                           &r.cu_seqlens_q, &r.cu_seqlens_kv}) {
    optional->tensor = arguments.take<std::optional<Tensor>>();
  }
  r.dropout_seed = arguments.take<std::optional<Tensor>>();
}

void take_settings(Arguments& arguments, Request& r) {
  AttentionProblem& p = r.problem;
  p.q_len = arguments.take<int64_t>();
  p.kv_len = arguments.take<int64_t>();
  p.mask.left = arguments.take<int64_t>();
  p.mask.right = arguments.take<int64_t>();
  p.mask.prefix = arguments.take<int64_t>();
  p.scale = arguments.take<std::optional<double>>();
  p.softcap = arguments.take<double>();
  p.dropout = arguments.take<double>();
  p.determinism = arguments.take<bool>() ? Determinism::kRequired : Determinism::kAny;
  p.tf32 = arguments.take<bool>() ? Tf32::kAllowed : Tf32::kForbidden;
  if (auto backend = arguments.take<std::optional<std::string>>()) {
    r.options.backend = *std::move(backend);
  }
  r.options.threads = thread_count();
  r.order = arguments.take<bool>() ? Order::kHeadsFirst : Order::kRowsFirst;
}

Request take_request(Arguments& arguments) {
  Request request;
  take_tensors(arguments, request);
  take_settings(arguments, request);
  return request;
}

// An op always returns all of its results: one that was not asked for is a tensor of no elements.
Tensor or_nothing(const std::optional<Tensor>& result, Device device) {
  return result ? *result : *empty({0}, DType::kF32, device).tensor;
}

}  // namespace

void attention(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Request r = take_request(arguments);
  const AttentionResults results = run_attention(r, true);
  give_back(stack, results.out, *results.lse);
}

void attention_no_grad(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Request r = take_request(arguments);
  give_back(stack, run_attention(r, false).out);
}

void attention_backward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  AttentionGradientRequest g;
  g.dout.tensor = arguments.take<Tensor>();
  g.dlse.tensor = arguments.take<std::optional<Tensor>>();
  g.out.tensor = arguments.take<Tensor>();
  g.lse.tensor = arguments.take<Tensor>();
  g.want_dbias = arguments.take<bool>();
  g.want_dsink = arguments.take<bool>();
  Request r = take_request(arguments);
  const AttentionGradients d = run_attention_backward(r, g);
  const Device device = r.q.view.device;
  give_back(stack, d.dq, d.dk, d.dv, or_nothing(d.dbias, device), or_nothing(d.dsink, device));
}

}  // namespace fovea::torch_ops
