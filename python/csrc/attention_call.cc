// Views of a call's tensors, its problem and plan, new tensors for its results, and the passes.
#include "attention_call.h"

#include <stdexcept>
#include <string>

namespace fovea::torch_ops {
namespace {

// As the library counts dimensions: [batch, row, head, dim].
void put_rows_first(const AttentionRequest& r, Viewed& tensor) {
  if (r.order == Order::kHeadsFirst) swap_rows_and_heads(tensor.view);
}

void check_ranks(const AttentionRequest& r) {
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
void read_sizes(AttentionRequest& r) {
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

void read_features(AttentionRequest& r) {
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

// What follows from a request that was read.
void complete(AttentionRequest& r) {
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

void set_inputs(const AttentionRequest& r, AttentionInputs& to) {
  to.q = r.q.view, to.k = r.k.view, to.v = r.v.view;
  to.bias = r.bias.view, to.mask = r.mask.view;
  to.key_lengths = r.key_lengths.view;
  to.alibi_slopes = r.alibi_slopes.view, to.sink = r.sink.view;
  to.cu_seqlens_q = r.cu_seqlens_q.view, to.cu_seqlens_kv = r.cu_seqlens_kv.view;
  to.dropout = read_dropout_seed(r.dropout_seed, r.problem.dropout);
}

// The plan of a thread's last call, which most often is that of its next: found without asking the
// library, whose look at the machine takes longer than all else here.
struct LastPlan {
  AttentionProblem problem;
  PlanOptions options;
  Device device;
  std::optional<Plan> plan;

  bool is_for(const AttentionRequest& r) const {
    return plan && problem == r.problem && device == r.q.view.device && options == r.options;
  }
};

const Plan& plan_for(const AttentionRequest& r) {
  thread_local LastPlan last;
  if (!last.is_for(r)) {
    Result<Plan> plan = make_plan(r.problem, r.q.view.device, r.options);
    raise_unless_ok(plan.status());
    last = {r.problem, r.options, r.q.view.device, *std::move(plan)};
  }
  return *last.plan;
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

}  // namespace

AttentionResults run_attention(AttentionRequest& r, bool with_lse) {
  complete(r);
  const Plan& plan = plan_for(r);
  const Device device = r.q.view.device;
  const Viewed out = empty_out(r.problem, device, r.order);
  Viewed lse;
  if (with_lse) lse = empty_lse(r.problem, device);
  ForwardTensors tensors;
  set_inputs(r, tensors);
  tensors.out = out.view;
  tensors.lse = lse.view;
  const Scratch scratch(plan.workspace_bytes(Pass::kForward), device);
  raise_unless_ok(plan.forward(tensors, scratch.workspace(), current_stream(device)));
  return {*out.tensor, lse.tensor};
}

AttentionGradients run_attention_backward(AttentionRequest& r, AttentionGradientRequest& g) {
  complete(r);
  make_view("dout", g.dout);
  make_view("dlse", g.dlse);
  make_view("out", g.out);
  make_view("lse", g.lse);
  put_rows_first(r, g.dout);
  put_rows_first(r, g.out);
  const Plan& plan = plan_for(r);
  const Device device = r.q.view.device;
  const Viewed dq = empty_like(r.q.view, r.order);
  const Viewed dk = empty_like(r.k.view, r.order);
  const Viewed dv = empty_like(r.v.view, r.order);
  Viewed dbias, dsink;
  if (g.want_dbias && r.bias.view.given()) dbias = empty_like(r.bias.view);
  if (g.want_dsink && r.sink.view.given()) dsink = empty_like(r.sink.view);
  BackwardTensors tensors;
  set_inputs(r, tensors);
  tensors.out = g.out.view, tensors.lse = g.lse.view;
  tensors.dout = g.dout.view, tensors.dlse = g.dlse.view;
  tensors.dq = dq.view, tensors.dk = dk.view, tensors.dv = dv.view;
  tensors.dbias = dbias.view, tensors.dsink = dsink.view;
  const Scratch scratch(plan.workspace_bytes(Pass::kBackward), device);
  raise_unless_ok(plan.backward(tensors, scratch.workspace(), current_stream(device)));
  return {*dq.tensor, *dk.tensor, *dv.tensor, dbias.tensor, dsink.tensor};
}

}  // namespace fovea::torch_ops
