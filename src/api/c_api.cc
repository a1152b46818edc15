// The C API: structs translated to those of the C++ API, and the message of a refusal kept per
// thread. The enums of both agree by value.
#include "fovea/c_api.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <string>
#include <vector>

#include "api/guard.h"
#include "base/refusal.h"
#include "fovea/host_memory.h"
#include "fovea/plan.h"
#include "fovea/version.h"

struct fovea_plan {
  fovea::Plan plan;
  std::string explain;
};

namespace fovea {
namespace {

static_assert(FOVEA_F32 == static_cast<int>(DType::kF32));
static_assert(FOVEA_F16 == static_cast<int>(DType::kF16));
static_assert(FOVEA_BF16 == static_cast<int>(DType::kBf16));
static_assert(FOVEA_F64 == static_cast<int>(DType::kF64));
static_assert(FOVEA_BOOL == static_cast<int>(DType::kBool));
static_assert(FOVEA_I32 == static_cast<int>(DType::kI32));
static_assert(FOVEA_CPU == static_cast<int>(DeviceType::kCpu));
static_assert(FOVEA_CUDA == static_cast<int>(DeviceType::kCuda));
static_assert(FOVEA_LAYOUT_PACKED == static_cast<int>(Layout::kPacked));
static_assert(FOVEA_FEATURE_BIAS == static_cast<int>(Feature::kBias));
static_assert(FOVEA_FEATURE_BOOL_MASK == static_cast<int>(Feature::kBoolMask));
static_assert(FOVEA_FEATURE_KEY_LENGTHS == static_cast<int>(Feature::kKeyLengths));
static_assert(FOVEA_FEATURE_ALIBI == static_cast<int>(Feature::kAlibi));
static_assert(FOVEA_FEATURE_SINK == static_cast<int>(Feature::kSink));
static_assert(FOVEA_INTERNAL == static_cast<int>(StatusCode::kInternal));
static_assert(FOVEA_UNBOUNDED == Mask::kUnbounded);
static_assert(FOVEA_MAX_RANK == TensorView::kMaxRank);

std::string& last_error() {
  thread_local std::string message;
  return message;
}

// Runs a call and keeps its message; the one place where a C++ status becomes a C one.
template <typename Body>
fovea_status reported(Body&& body) noexcept {
  Status status = guarded<Status>(body);
  const auto code = static_cast<fovea_status>(status.code());
  try {
    last_error() = status.message();
  } catch (...) {
    last_error().clear();  // no memory for the text; the code still tells
  }
  return code;
}

Device device_of(int32_t type, int32_t index) {
  return {type == 0 ? DeviceType::kCpu : static_cast<DeviceType>(type), index};
}

TensorView view_of(const fovea_tensor& t) {
  TensorView view;
  view.data = t.data;
  view.dtype = static_cast<DType>(t.dtype);
  view.device = device_of(t.device_type, t.device_index);
  view.rank = t.rank;
  std::copy(t.sizes, t.sizes + FOVEA_MAX_RANK, view.sizes.begin());
  std::copy(t.strides, t.strides + FOVEA_MAX_RANK, view.strides.begin());
  return view;
}

AttentionProblem problem_of(const fovea_problem& c) {
  AttentionProblem p;
  p.batch = c.batch;
  p.head_q = c.head_q;
  p.head_kv = c.head_kv;
  p.q_len = c.q_len;
  p.kv_len = c.kv_len;
  p.dim_qk = c.dim_qk;
  p.dim_v = c.dim_v;
  p.total_q = c.total_q;
  p.total_kv = c.total_kv;
  p.mask = {c.mask_left, c.mask_right, c.mask_prefix};
  p.dtype = static_cast<DType>(c.dtype);
  p.layout = static_cast<Layout>(c.layout);
  p.features = static_cast<Feature>(c.features);
  p.determinism = c.deterministic != 0 ? Determinism::kRequired : Determinism::kAny;
  p.tf32 = c.allow_tf32 != 0 ? Tf32::kAllowed : Tf32::kForbidden;
  if (c.has_scale != 0) p.scale = c.scale;
  if (c.has_logit_bound != 0) p.logit_bound = c.logit_bound;
  p.softcap = c.softcap;
  p.dropout = c.dropout;
  return p;
}

void set_inputs(AttentionInputs& t, const fovea_attention_inputs& c) {
  t.q = view_of(c.q);
  t.k = view_of(c.k);
  t.v = view_of(c.v);
  t.bias = view_of(c.bias);
  t.mask = view_of(c.mask);
  t.key_lengths = view_of(c.key_lengths);
  t.alibi_slopes = view_of(c.alibi_slopes);
  t.sink = view_of(c.sink);
  t.cu_seqlens_q = view_of(c.cu_seqlens_q);
  t.cu_seqlens_kv = view_of(c.cu_seqlens_kv);
  t.dropout = {c.dropout_seed, c.dropout_offset};
}

ForwardTensors tensors_of(const fovea_forward_tensors& c) {
  ForwardTensors t;
  set_inputs(t, c.inputs);
  t.out = view_of(c.out);
  t.lse = view_of(c.lse);
  return t;
}

BackwardTensors tensors_of(const fovea_backward_tensors& c) {
  BackwardTensors t;
  set_inputs(t, c.inputs);
  t.out = view_of(c.out);
  t.lse = view_of(c.lse);
  t.dout = view_of(c.dout);
  t.dlse = view_of(c.dlse);
  t.dq = view_of(c.dq);
  t.dk = view_of(c.dk);
  t.dv = view_of(c.dv);
  t.dbias = view_of(c.dbias);
  t.dsink = view_of(c.dsink);
  return t;
}

Status refuse_null(const char* call, const char* argument) {
  return refuse(call, argument, "null", must("point to one"));
}

Status create(const fovea_problem& problem, const fovea_plan_options* options, fovea_plan** plan) {
  PlanOptions chosen;
  Device device = Device::cpu();
  if (options != nullptr) {
    if (options->backend != nullptr) chosen.backend = options->backend;
    chosen.threads = options->threads;
    if (options->running_max != 0) chosen.softmax = SoftmaxRule::kRunningMax;
    device = device_of(options->device_type, options->device_index);
  }
  Result<Plan> made = make_plan(problem_of(problem), device, chosen);
  if (!made.ok()) return made.status();
  std::string text = made->explain();
  *plan = new fovea_plan{std::move(*made), std::move(text)};
  return {};
}

}  // namespace
}  // namespace fovea

using fovea::refuse_null;
using fovea::reported;
using fovea::Status;

const char* fovea_last_error(void) { return fovea::last_error().c_str(); }
const char* fovea_version(void) { return fovea::version(); }

fovea_tensor fovea_tensor_contiguous(void* data, int32_t dtype, int32_t rank,
                                     const int64_t* sizes) {
  fovea_tensor t = FOVEA_TENSOR_INIT;
  t.data = data;
  t.dtype = dtype;
  t.rank = rank >= 0 && rank <= FOVEA_MAX_RANK && (rank == 0 || sizes != nullptr) ? rank : -1;
  uint64_t dense = 1;  // wraps where the size is absurd; the call that takes the tensor refuses it
  for (int32_t i = t.rank - 1; i >= 0; --i) {
    t.sizes[i] = sizes[i];
    t.strides[i] = static_cast<int64_t>(dense);
    dense *= static_cast<uint64_t>(sizes[i]);
  }
  return t;
}

void fovea_problem_init(fovea_problem* problem) {
  if (problem != nullptr) *problem = FOVEA_PROBLEM_INIT;
}
void fovea_plan_options_init(fovea_plan_options* options) {
  if (options != nullptr) *options = FOVEA_PLAN_OPTIONS_INIT;
}
void fovea_tensor_init(fovea_tensor* tensor) {
  if (tensor != nullptr) *tensor = FOVEA_TENSOR_INIT;
}
void fovea_forward_tensors_init(fovea_forward_tensors* tensors) {
  if (tensors != nullptr) *tensors = FOVEA_FORWARD_TENSORS_INIT;
}
void fovea_backward_tensors_init(fovea_backward_tensors* tensors) {
  if (tensors != nullptr) *tensors = FOVEA_BACKWARD_TENSORS_INIT;
}

fovea_status fovea_plan_create(const fovea_problem* problem, const fovea_plan_options* options,
                               fovea_plan** plan) {
  return reported([&]() -> Status {
    if (plan == nullptr) return refuse_null("fovea_plan_create", "plan");
    *plan = nullptr;
    if (problem == nullptr) return refuse_null("fovea_plan_create", "problem");
    return fovea::create(*problem, options, plan);
  });
}

void fovea_plan_destroy(fovea_plan* plan) { delete plan; }

const char* fovea_plan_backend(const fovea_plan* plan) {
  return plan != nullptr ? plan->plan.backend().c_str() : nullptr;
}
const char* fovea_plan_kernel(const fovea_plan* plan) {
  return plan != nullptr ? plan->plan.kernel().c_str() : nullptr;
}
const char* fovea_plan_explain(const fovea_plan* plan) {
  return plan != nullptr ? plan->explain.c_str() : nullptr;
}

fovea_status fovea_plan_workspace_bytes(const fovea_plan* plan, int32_t pass, size_t* bytes) {
  constexpr const char* kCall = "fovea_plan_workspace_bytes";
  return reported([&]() -> Status {
    if (plan == nullptr) return refuse_null(kCall, "plan");
    if (bytes == nullptr) return refuse_null(kCall, "bytes");
    if (pass != FOVEA_PASS_FORWARD && pass != FOVEA_PASS_BACKWARD) {
      return fovea::refuse(kCall, "pass", fovea::show(int64_t{pass}), fovea::must_be_in(0, 1));
    }
    *bytes = plan->plan.workspace_bytes(pass == FOVEA_PASS_FORWARD ? fovea::Pass::kForward
                                                                   : fovea::Pass::kBackward);
    return {};
  });
}

fovea_status fovea_host_memory_create(size_t bytes, void** memory) {
  return reported([&]() -> Status {
    if (memory == nullptr) return refuse_null("fovea_host_memory_create", "memory");
    *memory = nullptr;
    fovea::Result<fovea::HostMemory> made = fovea::HostMemory::allocate(bytes);
    if (made.ok()) *memory = made->release();
    return made.status();
  });
}

void fovea_host_memory_destroy(void* memory) { std::free(memory); }

fovea_status fovea_forward(const fovea_plan* plan, const fovea_forward_tensors* tensors,
                           void* workspace, size_t workspace_bytes, void* stream) {
  return reported([&]() -> Status {
    if (plan == nullptr) return refuse_null("fovea_forward", "plan");
    if (tensors == nullptr) return refuse_null("fovea_forward", "tensors");
    return plan->plan.forward(fovea::tensors_of(*tensors), {workspace, workspace_bytes}, {stream});
  });
}

fovea_status fovea_backward(const fovea_plan* plan, const fovea_backward_tensors* tensors,
                            void* workspace, size_t workspace_bytes, void* stream) {
  return reported([&]() -> Status {
    if (plan == nullptr) return refuse_null("fovea_backward", "plan");
    if (tensors == nullptr) return refuse_null("fovea_backward", "tensors");
    return plan->plan.backward(fovea::tensors_of(*tensors), {workspace, workspace_bytes}, {stream});
  });
}

fovea_status fovea_merge(const fovea_partial_result* parts, int64_t count, const fovea_tensor* out,
                         const fovea_tensor* lse, void* stream) {
  return reported([&]() -> Status {
    if (out == nullptr) return refuse_null("fovea_merge", "out");
    if (lse == nullptr) return refuse_null("fovea_merge", "lse");
    if (count < 1) {
      return fovea::refuse("fovea_merge", "count", fovea::show(count), fovea::must_be_at_least(1));
    }
    if (parts == nullptr) return refuse_null("fovea_merge", "parts");
    std::vector<fovea::PartialResult> views;
    for (int64_t n = 0; n < count; ++n) {
      views.push_back({fovea::view_of(parts[n].out), fovea::view_of(parts[n].lse)});
    }
    return fovea::merge(views.data(), count, fovea::view_of(*out), fovea::view_of(*lse), {stream});
  });
}
