// The ops fovea::attention and fovea::attention_backward.
#include <stdexcept>
#include <string>

#include "ops.h"
#include "torch_tensor.h"

namespace fovea::torch_ops {
namespace {

// What both passes are told, in the order of the schemas in ops.cc.
struct Request {
  Viewed q, k, v;
  Viewed bias, mask, key_lengths, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_kv;
  std::optional<Tensor> dropout_seed;
  Order order = Order::kRowsFirst;  // of q, k, v, out and their gradients
  AttentionProblem problem;
  PlanOptions options;
};

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

// As the library counts dimensions: [batch, row, head, dim].
void put_rows_first(const Request& r, Viewed& tensor) {
  if (r.order == Order::kHeadsFirst) swap_rows_and_heads(tensor.view);
}

void check_ranks(const Request& r) {
  const bool packed = r.problem.layout == Layout::kPacked;
  const int rank = packed ? 3 : 4;
  for (const auto& [name, tensor] :
       {std::pair{"q", &r.q}, std::pair{"k", &r.k}, std::pair{"v", &r.v}}) {
    if (tensor->view.rank == rank) continue;
    throw std::runtime_error(std::string("fovea: ") + name + ".rank is " +
                             std::to_string(tensor->view.rank) + ", must be " +
                             std::to_string(rank) + (packed ? " in the packed layout" : ""));
  }
  if (packed && r.order == Order::kHeadsFirst) {
    throw std::runtime_error("fovea: heads_first is true, must be false in the packed layout");
  }
}

// The sizes of the problem are those of q, k and v; the library then holds every tensor against
// them.
void read_sizes(Request& r) {
  AttentionProblem& p = r.problem;
  const auto& q = r.q.view.sizes;
  const auto& k = r.k.view.sizes;
  const auto& v = r.v.view.sizes;
  p.dtype = r.q.view.dtype;
  if (p.layout == Layout::kPacked) {
    p.batch = r.cu_seqlens_q.view.given() ? r.cu_seqlens_q.view.sizes[0] - 1 : 0;
    p.total_q = q[0], p.total_kv = k[0];
    p.head_q = q[1], p.head_kv = k[1];
    p.dim_qk = q[2], p.dim_v = v[2];
  } else {
    p.batch = q[0], p.q_len = q[1], p.kv_len = k[1];
    p.head_q = q[2], p.head_kv = k[2];
    p.dim_qk = q[3], p.dim_v = v[3];
  }
}

void read_features(Request& r) {
  const auto add = [&](const Viewed& tensor, Feature feature) {
    if (tensor.view.given()) r.problem.features = r.problem.features | feature;
  };
  add(r.bias, Feature::kBias);
  add(r.mask, Feature::kBoolMask);
  add(r.key_lengths, Feature::kKeyLengths);
  add(r.alibi_slopes, Feature::kAlibi);
  add(r.sink, Feature::kSink);
  if (r.cu_seqlens_q.view.given() || r.cu_seqlens_kv.view.given()) {
    r.problem.layout = Layout::kPacked;
  }
}

Request take_request(Arguments& arguments) {
  Request request;
  take_tensors(arguments, request);
  take_settings(arguments, request);
  return request;
}

// What follows from a request that was read.
void complete(Request& r) {
  make_view("q", r.q);
  make_view("k", r.k);
  make_view("v", r.v);
  make_view("bias", r.bias);
  make_view("mask", r.mask);
  make_view("key_lengths", r.key_lengths);
  make_view("alibi_slopes", r.alibi_slopes);
  make_view("sink", r.sink);
  make_view("cu_seqlens_q", r.cu_seqlens_q);
  make_view("cu_seqlens_kv", r.cu_seqlens_kv);
  read_features(r);
  check_ranks(r);
  for (Viewed* tensor : {&r.q, &r.k, &r.v}) put_rows_first(r, *tensor);
  read_sizes(r);
}

void set_inputs(const Request& r, AttentionInputs& to) {
  to.q = r.q.view, to.k = r.k.view, to.v = r.v.view;
  to.bias = r.bias.view, to.mask = r.mask.view;
  to.key_lengths = r.key_lengths.view;
  to.alibi_slopes = r.alibi_slopes.view, to.sink = r.sink.view;
  to.cu_seqlens_q = r.cu_seqlens_q.view, to.cu_seqlens_kv = r.cu_seqlens_kv.view;
  to.dropout = read_dropout_seed(r.dropout_seed, r.problem.dropout);
}

Plan plan_for(const Request& r) {
  Result<Plan> plan = make_plan(r.problem, r.q.view.device, r.options);
  raise_unless_ok(plan.status());
  return *std::move(plan);
}

Viewed empty_out(const AttentionProblem& p, Device device, Order order) {
  if (p.layout == Layout::kPacked) return empty({p.total_q, p.head_q, p.dim_v}, p.dtype, device);
  return empty({p.batch, p.q_len, p.head_q, p.dim_v}, p.dtype, device, order);
}

Viewed empty_lse(const AttentionProblem& p, Device device) {
  const DType dtype = p.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  if (p.layout == Layout::kPacked) return empty({p.head_q, p.total_q}, dtype, device);
  return empty({p.batch, p.head_q, p.q_len}, dtype, device);
}

// A gradient that was not asked for is a tensor of no elements: an op always returns all of its
// results.
Viewed empty_gradient(const Viewed& of, bool wanted) {
  if (wanted && of.view.given()) return empty_like(of.view);
  return empty({0}, DType::kF32, of.view.device);
}

}  // namespace

void attention(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Request r = take_request(arguments);
  complete(r);
  const Plan plan = plan_for(r);
  const Device device = r.q.view.device;
  const Viewed out = empty_out(r.problem, device, r.order);
  const Viewed lse = empty_lse(r.problem, device);
  ForwardTensors tensors;
  set_inputs(r, tensors);
  tensors.out = out.view;
  tensors.lse = lse.view;
  const Scratch scratch(plan.workspace_bytes(Pass::kForward), device);
  raise_unless_ok(plan.forward(tensors, scratch.workspace(), current_stream(device)));
  give_back(stack, *out.tensor, *lse.tensor);
}

void attention_backward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Viewed dout, dlse, out, lse;
  dout.tensor = arguments.take<Tensor>();
  dlse.tensor = arguments.take<std::optional<Tensor>>();
  out.tensor = arguments.take<Tensor>();
  lse.tensor = arguments.take<Tensor>();
  const bool want_dbias = arguments.take<bool>();
  const bool want_dsink = arguments.take<bool>();
  Request r = take_request(arguments);
  complete(r);
  make_view("dout", dout);
  make_view("dlse", dlse);
  make_view("out", out);
  make_view("lse", lse);
  put_rows_first(r, dout);
  put_rows_first(r, out);
  const Plan plan = plan_for(r);
  const Device device = r.q.view.device;
  const Viewed dq = empty_like(r.q.view, r.order);
  const Viewed dk = empty_like(r.k.view, r.order);
  const Viewed dv = empty_like(r.v.view, r.order);
  const Viewed dbias = empty_gradient(r.bias, want_dbias);
  const Viewed dsink = empty_gradient(r.sink, want_dsink);
  BackwardTensors tensors;
  set_inputs(r, tensors);
  tensors.out = out.view, tensors.lse = lse.view;
  tensors.dout = dout.view, tensors.dlse = dlse.view;
  tensors.dq = dq.view, tensors.dk = dk.view, tensors.dv = dv.view;
  if (want_dbias) tensors.dbias = dbias.view;
  if (want_dsink) tensors.dsink = dsink.view;
  const Scratch scratch(plan.workspace_bytes(Pass::kBackward), device);
  raise_unless_ok(plan.backward(tensors, scratch.workspace(), current_stream(device)));
  give_back(stack, *dq.tensor, *dk.tensor, *dv.tensor, *dbias.tensor, *dsink.tensor);
}

}  // namespace fovea::torch_ops
