// Whether the tensors of a forward or backward call fit the problem of their plan.
#include <algorithm>
#include <string>

#include "api/check.h"
#include "api/check_sequences.h"
#include "api/check_tensor.h"
#include "base/refusal.h"

namespace fovea {
namespace {

// One call's checks; each member checks one group of tensors and stops at the first fault.
class CallCheck {
 public:
  CallCheck(const char* call, const AttentionProblem& problem, Device device)
      : call_(call), p_(problem), device_(device), packed_(problem.layout == Layout::kPacked) {}

  Status inputs(const AttentionInputs& t) const;
  Status forward_outputs(const ForwardTensors& t) const;
  Status backward_inputs(const BackwardTensors& t) const;
  Status gradients(const BackwardTensors& t) const;

 private:
  Status required(const TensorView& t, const TensorRule& rule) const;
  Status declared(bool is_declared, const char* what, const TensorView& t,
                  const TensorRule& rule) const;
  Status optional_inputs(const AttentionInputs& t) const;
  Status sequences(const AttentionInputs& t) const;

  TensorRule rule(const char* argument, Access access = Access::kRead) const;
  TensorRule query_rule(const char* argument, Dim dim, Access access = Access::kRead) const;
  TensorRule key_rule(const char* argument, Dim dim, Access access = Access::kRead) const;
  TensorRule lse_rule(const char* argument, Access access = Access::kRead) const;
  TensorRule score_rule(const char* argument, std::array<DType, 2> dtypes) const;
  TensorRule sink_rule(const char* argument, Access access = Access::kRead) const;
  TensorRule lengths_rule(const char* argument, Dim dim) const;

  // Statistics and per-head scalars: f32 for every dtype that f32 can carry.
  DType wide() const { return p_.dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

  const char* call_;
  const AttentionProblem& p_;
  Device device_;
  bool packed_;
};

TensorRule CallCheck::rule(const char* argument, Access access) const {
  TensorRule r;
  r.call = call_;
  r.argument = argument;
  r.device = device_;
  r.dtypes = {p_.dtype, p_.dtype};
  r.access = access;
  return r;
}

TensorRule CallCheck::query_rule(const char* argument, Dim dim, Access access) const {
  TensorRule r = rule(argument, access);
  if (packed_) {
    r.set_dims({{"total_q", p_.total_q}, {"head_q", p_.head_q}, dim});
  } else {
    r.set_dims({{"batch", p_.batch}, {"q_len", p_.q_len}, {"head_q", p_.head_q}, dim});
  }
  return r;
}

TensorRule CallCheck::key_rule(const char* argument, Dim dim, Access access) const {
  TensorRule r = rule(argument, access);
  if (packed_) {
    r.set_dims({{"total_kv", p_.total_kv}, {"head_kv", p_.head_kv}, dim});
  } else {
    r.set_dims({{"batch", p_.batch}, {"kv_len", p_.kv_len}, {"head_kv", p_.head_kv}, dim});
  }
  return r;
}

TensorRule CallCheck::lse_rule(const char* argument, Access access) const {
  TensorRule r = rule(argument, access);
  r.dtypes = {wide(), wide()};
  r.last_stride = LastStride::kAny;
  if (packed_) {
    r.set_dims({{"head_q", p_.head_q}, {"total_q", p_.total_q}});
  } else {
    r.set_dims({{"batch", p_.batch}, {"head_q", p_.head_q}, {"q_len", p_.q_len}});
  }
  return r;
}

TensorRule CallCheck::score_rule(const char* argument, std::array<DType, 2> dtypes) const {
  TensorRule r = rule(argument);
  r.dtypes = dtypes;
  r.broadcast = Broadcast::kAllButLast;
  r.set_dims(
      {{"batch", p_.batch}, {"head_q", p_.head_q}, {"q_len", p_.q_len}, {"kv_len", p_.kv_len}});
  return r;
}

TensorRule CallCheck::sink_rule(const char* argument, Access access) const {
  TensorRule r = rule(argument, access);
  r.dtypes = {wide(), wide()};
  r.set_dims({{"head_q", p_.head_q}});
  return r;
}

TensorRule CallCheck::lengths_rule(const char* argument, Dim dim) const {
  TensorRule r = rule(argument);
  r.dtypes = {DType::kI32, DType::kI32};
  r.set_dims({dim});
  return r;
}

Status CallCheck::required(const TensorView& t, const TensorRule& r) const {
  if (!t.given()) return refuse(call_, r.argument, "not given", must_be_given());
  return check_tensor(t, r);
}

// A tensor of a feature is given exactly when the problem declares that feature.
Status CallCheck::declared(bool is_declared, const char* what, const TensorView& t,
                           const TensorRule& r) const {
  if (!is_declared) {
    if (!t.given()) return {};
    return refuse(call_, r.argument, "given", but("the problem has no " + std::string(what)));
  }
  if (!t.given()) {
    return refuse(call_, r.argument, "not given", but("the problem has " + std::string(what)));
  }
  return check_tensor(t, r);
}

Status CallCheck::inputs(const AttentionInputs& t) const {
  if (Status s = required(t.q, query_rule("q", {"dim_qk", p_.dim_qk})); !s.ok()) return s;
  if (Status s = required(t.k, key_rule("k", {"dim_qk", p_.dim_qk})); !s.ok()) return s;
  if (Status s = required(t.v, key_rule("v", {"dim_v", p_.dim_v})); !s.ok()) return s;
  if (Status s = optional_inputs(t); !s.ok()) return s;
  return sequences(t);
}

Status CallCheck::optional_inputs(const AttentionInputs& t) const {
  const auto holds = [&](Feature feature) { return has(p_.features, feature); };
  if (Status s = declared(holds(Feature::kBias), "bias", t.bias,
                          score_rule("bias", {p_.dtype, DType::kF32}));
      !s.ok()) {
    return s;
  }
  if (Status s = declared(holds(Feature::kBoolMask), "boolean mask", t.mask,
                          score_rule("mask", {DType::kBool, DType::kBool}));
      !s.ok()) {
    return s;
  }
  if (t.alibi_slopes.given() && holds(Feature::kAlibi) && t.alibi_slopes.rank != 1 &&
      t.alibi_slopes.rank != 2) {
    return refuse(call_, "alibi_slopes.rank", show(int64_t{t.alibi_slopes.rank}),
                  must("be 1 or 2"));
  }
  TensorRule alibi = sink_rule("alibi_slopes");
  if (t.alibi_slopes.rank == 2) {
    alibi.set_dims({{"batch", p_.batch}, {"head_q", p_.head_q}});
  }
  if (Status s = declared(holds(Feature::kAlibi), "ALiBi slopes", t.alibi_slopes, alibi); !s.ok()) {
    return s;
  }
  return declared(holds(Feature::kSink), "sink", t.sink, sink_rule("sink"));
}

Status CallCheck::sequences(const AttentionInputs& t) const {
  TensorRule lengths = lengths_rule("key_lengths", {"batch", p_.batch});
  lengths.last_stride = LastStride::kAny;
  if (Status s =
          declared(has(p_.features, Feature::kKeyLengths), "key lengths", t.key_lengths, lengths);
      !s.ok()) {
    return s;
  }
  // The dimension is one longer than the batch; its name says so in the message.
  const Dim bounds{"batch + 1", p_.batch + 1};
  if (Status s =
          declared(packed_, "packed layout", t.cu_seqlens_q, lengths_rule("cu_seqlens_q", bounds));
      !s.ok()) {
    return s;
  }
  if (Status s = declared(packed_, "packed layout", t.cu_seqlens_kv,
                          lengths_rule("cu_seqlens_kv", bounds));
      !s.ok()) {
    return s;
  }
  if (device_.type != DeviceType::kCpu) return {};  // values of another device cannot be read here
  if (t.key_lengths.given()) {
    if (Status s = check_key_lengths(call_, t.key_lengths, p_.kv_len); !s.ok()) return s;
  }
  if (!packed_) return {};
  if (Status s = check_cu_seqlens({call_, "cu_seqlens_q", "q_len", p_.q_len, "total_q", p_.total_q},
                                  t.cu_seqlens_q);
      !s.ok()) {
    return s;
  }
  return check_cu_seqlens({call_, "cu_seqlens_kv", "kv_len", p_.kv_len, "total_kv", p_.total_kv},
                          t.cu_seqlens_kv);
}

Status CallCheck::forward_outputs(const ForwardTensors& t) const {
  if (Status s = required(t.out, query_rule("out", {"dim_v", p_.dim_v}, Access::kWrite)); !s.ok()) {
    return s;
  }
  if (!t.lse.given()) return {};
  return check_tensor(t.lse, lse_rule("lse", Access::kWrite));
}

Status CallCheck::backward_inputs(const BackwardTensors& t) const {
  if (Status s = required(t.out, query_rule("out", {"dim_v", p_.dim_v})); !s.ok()) return s;
  if (Status s = required(t.lse, lse_rule("lse")); !s.ok()) return s;
  if (Status s = required(t.dout, query_rule("dout", {"dim_v", p_.dim_v})); !s.ok()) return s;
  if (!t.dlse.given()) return {};
  return check_tensor(t.dlse, lse_rule("dlse"));
}

Status CallCheck::gradients(const BackwardTensors& t) const {
  const auto kWrite = Access::kWrite;
  if (Status s = required(t.dq, query_rule("dq", {"dim_qk", p_.dim_qk}, kWrite)); !s.ok()) return s;
  if (Status s = required(t.dk, key_rule("dk", {"dim_qk", p_.dim_qk}, kWrite)); !s.ok()) return s;
  if (Status s = required(t.dv, key_rule("dv", {"dim_v", p_.dim_v}, kWrite)); !s.ok()) return s;
  if (t.dbias.given()) {
    TensorRule r = score_rule("dbias", {t.bias.dtype, DType::kF32});
    r.access = kWrite;
    r.broadcast = Broadcast::kNo;
    r.origin = "bias";  // a broadcast dimension of bias is reduced, so dbias has it too
    for (size_t i = 0; i < r.dims.size(); ++i) r.dims[i].size = t.bias.sizes[i];
    if (Status s = declared(has(p_.features, Feature::kBias), "bias", t.dbias, r); !s.ok()) {
      return s;
    }
  }
  if (!t.dsink.given()) return {};
  return declared(has(p_.features, Feature::kSink), "sink", t.dsink, sink_rule("dsink", kWrite));
}

struct NamedTensor {
  const char* name;
  const TensorView* view;
};

// An output that starts where another tensor does would be overwritten while it is still read.
// Tensors may interleave (slices of one qkv buffer), so their ranges are not compared.
template <size_t kOutputs, size_t kInputs>
Status check_aliases(const char* call, const std::array<NamedTensor, kOutputs>& outputs,
                     const std::array<NamedTensor, kInputs>& inputs) {
  const auto clash = [&](const NamedTensor& output, const NamedTensor& other) {
    return refuse(call, std::string(output.name) + ".data",
                  show(static_cast<const void*>(output.view->data)),
                  must("not be that of " + std::string(other.name)));
  };
  for (size_t i = 0; i < kOutputs; ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (same_start(*outputs[i].view, *outputs[j].view)) return clash(outputs[i], outputs[j]);
    }
    for (const NamedTensor& input : inputs) {
      if (same_start(*outputs[i].view, *input.view)) return clash(outputs[i], input);
    }
  }
  return {};
}

constexpr size_t kSharedInputs = 10;
constexpr size_t kBackwardInputs = kSharedInputs + 4;

std::array<NamedTensor, kSharedInputs> named_inputs(const AttentionInputs& t) {
  return {{{"q", &t.q},
           {"k", &t.k},
           {"v", &t.v},
           {"bias", &t.bias},
           {"mask", &t.mask},
           {"key_lengths", &t.key_lengths},
           {"alibi_slopes", &t.alibi_slopes},
           {"sink", &t.sink},
           {"cu_seqlens_q", &t.cu_seqlens_q},
           {"cu_seqlens_kv", &t.cu_seqlens_kv}}};
}

}  // namespace

Status check_forward(const AttentionProblem& problem, Device device, const ForwardTensors& t) {
  const CallCheck check("forward", problem, device);
  if (Status s = check.inputs(t); !s.ok()) return s;
  if (Status s = check.forward_outputs(t); !s.ok()) return s;
  const std::array<NamedTensor, 2> outputs{{{"out", &t.out}, {"lse", &t.lse}}};
  return check_aliases("forward", outputs, named_inputs(t));
}

Status check_backward(const AttentionProblem& problem, Device device, const BackwardTensors& t) {
  const CallCheck check("backward", problem, device);
  if (Status s = check.inputs(t); !s.ok()) return s;
  if (Status s = check.backward_inputs(t); !s.ok()) return s;
  if (Status s = check.gradients(t); !s.ok()) return s;
  const std::array<NamedTensor, 5> outputs{
      {{"dq", &t.dq}, {"dk", &t.dk}, {"dv", &t.dv}, {"dbias", &t.dbias}, {"dsink", &t.dsink}}};
  std::array<NamedTensor, kBackwardInputs> inputs{};
  const auto shared = named_inputs(t);
  std::copy(shared.begin(), shared.end(), inputs.begin());
  inputs[kSharedInputs] = {"out", &t.out};
  inputs[kSharedInputs + 1] = {"lse", &t.lse};
  inputs[kSharedInputs + 2] = {"dout", &t.dout};
  inputs[kSharedInputs + 3] = {"dlse", &t.dlse};
  return check_aliases("backward", outputs, inputs);
}

Status check_workspace(const char* call, Workspace workspace, size_t needed) {
  if (needed == 0) return {};
  const auto bytes_text = [](size_t bytes) { return std::to_string(bytes); };
  if (workspace.data == nullptr) {
    return refuse(call, "workspace.data", "null",
                  must("point to " + bytes_text(needed) + " bytes"));
  }
  if (workspace.bytes < needed) {
    return refuse(call, "workspace.bytes", bytes_text(workspace.bytes),
                  must("be at least " + bytes_text(needed)));
  }
  if (reinterpret_cast<uintptr_t>(workspace.data) % kWorkspaceAlignment != 0) {
    return refuse(call, "workspace.data", show(static_cast<const void*>(workspace.data)),
                  must("be aligned to " + bytes_text(kWorkspaceAlignment) + " bytes"));
  }
  return {};
}

}  // namespace fovea
