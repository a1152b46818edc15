// Random valid requests, small enough to run a hundred thousand of them.
#include "fuzz/invalid_subject.h"

#include <algorithm>
#include <cstring>

namespace fovea::invalid {
namespace {

constexpr size_t kArenaBytes = 1 << 19;
constexpr std::byte kInputByte{0x3c};   // a small positive number in every float type
constexpr std::byte kOutputByte{0xc5};  // the canary

// Scratch of any size, kept from case to case: its contents mean nothing, and an engine's may be
// far larger than these tensors.
void* scratch(size_t bytes) {
  static std::vector<std::byte> memory;
  if (memory.size() < bytes + 2 * kWorkspaceAlignment) {
    memory.resize(bytes + 2 * kWorkspaceAlignment);
  }
  const auto at = reinterpret_cast<uintptr_t>(memory.data());
  return memory.data() + (kWorkspaceAlignment - at % kWorkspaceAlignment) % kWorkspaceAlignment;
}

uint64_t number_from(const char* variable, uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

}  // namespace

uint64_t Random::word() {
  state_ += 0x9E3779B97F4A7C15u;
  uint64_t x = state_;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

Arena::Arena() : memory_(static_cast<std::byte*>(std::aligned_alloc(64, kArenaBytes))) {}

void* Arena::take(int64_t bytes, std::byte fill) {
  const size_t whole = (static_cast<size_t>(bytes) + 63) / 64 * 64;
  if (used_ + whole + 64 > kArenaBytes) std::abort();  // a fault of this generator
  std::byte* at = memory_.get() + used_;
  std::memset(at, static_cast<int>(fill), whole + 64);  // a line between any two tensors
  used_ += whole + 64;
  return at;
}

bool Arena::unchanged() const {
  return std::memcmp(memory_.get(), copy_.data(), copy_.size()) == 0;
}

bool nonempty(const TensorView& t) { return t.rank > 0 && t.elements() != 0; }

uint64_t case_count() { return number_from("FOVEA_FUZZ_INVALID", 5000); }
uint64_t first_seed() { return number_from("FOVEA_FUZZ_INVALID_SEED", 1); }

std::string reproduce(uint64_t seed, const char* mutation) {
  return std::string("mutation ") + mutation + "; again: FOVEA_FUZZ_INVALID=1 " +
         "FOVEA_FUZZ_INVALID_SEED=" + std::to_string(seed) + " test_fuzz";
}

Subject::Subject(uint64_t seed) : random(seed * 0x9E3779B97F4A7C15u) {
  draw_problem();
  draw_tensors();
  list_arguments();
  const Result<Plan> plan = make_plan(problem, Device::cpu(), options);
  workspace_needed = plan.ok() ? plan->workspace_bytes(pass) : 0;
  workspace = {scratch(workspace_needed), workspace_needed};
}

void Subject::draw_problem() {
  AttentionProblem& p = problem;
  const auto length = [&] { return random.chance(8) ? 0 : random.range(1, 5); };
  p.batch = length();
  p.head_kv = random.range(1, 2);
  p.head_q = p.head_kv * random.range(1, 2);
  p.q_len = length();
  p.kv_len = length();
  p.dim_qk = random.range(1, 9);
  p.dim_v = random.range(1, 9);
  p.dtype = random.pick<DType>({DType::kF32, DType::kF16, DType::kBf16, DType::kF64});
  p.mask = random.pick<Mask>(
      {Mask::none(), Mask::causal(), Mask::window(2, 1), Mask::causal().with_prefix(2)});
  for (const Feature feature :
       {Feature::kBias, Feature::kBoolMask, Feature::kAlibi, Feature::kSink}) {
    if (random.chance(40)) p.features = p.features | feature;
  }
  if (random.chance(40)) {
    p.layout = Layout::kPacked;
  } else if (random.chance(40)) {
    p.features = p.features | Feature::kKeyLengths;
  }
  if (random.chance(30)) p.scale = 0.5;
  if (random.chance(20)) p.softcap = 30;
  if (random.chance(20)) p.dropout = 0.25;
  if (random.chance(20)) p.logit_bound = 100;
  pass = random.chance(50) ? Pass::kForward : Pass::kBackward;
  options.threads = 1;
  if (random.chance(50)) options.backend = "reference";
}

// Dimensions keep the last one innermost; the others in any order, now and then with a gap.
TensorView Subject::place(DType dtype, std::vector<int64_t> sizes, Use use) {
  TensorView t;
  t.dtype = dtype;
  t.rank = static_cast<int>(sizes.size());
  std::vector<size_t> order(sizes.size());  // outermost first
  for (size_t i = 0; i < sizes.size(); ++i) order[i] = i;
  if (sizes.size() > 2) std::swap(order[0], order[static_cast<size_t>(random.range(0, 1))]);
  if (sizes.size() > 3) std::swap(order[1], order[static_cast<size_t>(random.range(1, 2))]);
  int64_t stride = 1;
  for (size_t n = sizes.size(); n-- > 0;) {
    const size_t dim = order[n];
    t.sizes[dim] = sizes[dim];
    t.strides[dim] = stride;
    stride *= sizes[dim];
    if (random.chance(20)) stride += random.range(1, 3);
  }
  t.data = arena.take(std::max<int64_t>(stride, 1) * dtype_bytes(dtype),
                      use == Use::kInput ? kInputByte : kOutputByte);
  if (!nonempty(t) && random.chance(50)) t.data = nullptr;
  return t;
}

TensorView Subject::place_rows(int64_t len, int64_t total, int64_t heads, int64_t dim, Use use) {
  if (problem.layout == Layout::kPacked) return place(problem.dtype, {total, heads, dim}, use);
  return place(problem.dtype, {problem.batch, len, heads, dim}, use);
}

TensorView Subject::place_lse(Use use) {
  const DType dtype = problem.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  if (problem.layout == Layout::kPacked) {
    return place(dtype, {problem.head_q, problem.total_q}, use);
  }
  return place(dtype, {problem.batch, problem.head_q, problem.q_len}, use);
}

TensorView Subject::place_scores(DType dtype) {
  const auto maybe_one = [&](int64_t size) { return random.chance(30) ? 1 : size; };
  TensorView t = place(dtype,
                       {maybe_one(problem.batch), maybe_one(problem.head_q),
                        maybe_one(problem.q_len), problem.kv_len},
                       Use::kInput);
  if (random.chance(20)) t.strides[static_cast<size_t>(random.range(0, 2))] = 0;  // expanded
  return t;
}

TensorView Subject::dense(DType dtype, std::initializer_list<int64_t> sizes) {
  TensorView t = TensorView::contiguous(nullptr, dtype, sizes);
  t.data = arena.take(std::max<int64_t>(t.elements(), 1) * dtype_bytes(dtype), kInputByte);
  return t;
}

void Subject::draw_tensors() {
  AttentionProblem& p = problem;
  const auto cu_seqlens = [&](int64_t longest, int64_t& total) {
    const TensorView t = dense(DType::kI32, {p.batch + 1});
    auto* bounds = static_cast<int32_t*>(t.data);
    bounds[0] = 0;
    for (int64_t b = 0; b < p.batch; ++b) {
      bounds[b + 1] = bounds[b] + static_cast<int32_t>(random.range(0, longest));
    }
    total = bounds[p.batch];
    return t;
  };
  if (p.layout == Layout::kPacked) {
    inputs.cu_seqlens_q = cu_seqlens(p.q_len, p.total_q);
    inputs.cu_seqlens_kv = cu_seqlens(p.kv_len, p.total_kv);
  }
  const DType wide = p.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  inputs.q = place_rows(p.q_len, p.total_q, p.head_q, p.dim_qk, Use::kInput);
  inputs.k = place_rows(p.kv_len, p.total_kv, p.head_kv, p.dim_qk, Use::kInput);
  inputs.v = place_rows(p.kv_len, p.total_kv, p.head_kv, p.dim_v, Use::kInput);
  if (has(p.features, Feature::kBias)) {
    inputs.bias = place_scores(random.chance(50) ? p.dtype : DType::kF32);
  }
  if (has(p.features, Feature::kBoolMask)) {
    inputs.mask = place_scores(DType::kBool);
    // Only 0 and 1 are legal values of a bool; the gap behind the tensor keeps its canary.
    if (nonempty(inputs.mask)) {
      int64_t reach = 1;
      for (size_t i = 0; i < 4; ++i) reach += (inputs.mask.sizes[i] - 1) * inputs.mask.strides[i];
      std::memset(inputs.mask.data, 1, static_cast<size_t>(reach));
    }
  }
  if (has(p.features, Feature::kKeyLengths)) {
    inputs.key_lengths = dense(DType::kI32, {p.batch});
    for (int64_t b = 0; b < p.batch; ++b) {
      static_cast<int32_t*>(inputs.key_lengths.data)[b] =
          static_cast<int32_t>(random.range(0, p.kv_len));
    }
  }
  if (has(p.features, Feature::kAlibi)) {
    inputs.alibi_slopes =
        random.chance(50) ? dense(wide, {p.head_q}) : dense(wide, {p.batch, p.head_q});
  }
  if (has(p.features, Feature::kSink)) inputs.sink = dense(wide, {p.head_q});

  const Use result = pass == Pass::kForward ? Use::kOutput : Use::kInput;
  out = place_rows(p.q_len, p.total_q, p.head_q, p.dim_v, result);
  if (pass == Pass::kBackward || random.chance(70)) lse = place_lse(result);
  if (pass == Pass::kForward) return;
  dout = place_rows(p.q_len, p.total_q, p.head_q, p.dim_v, Use::kInput);
  if (random.chance(40)) dlse = place_lse(Use::kInput);
  dq = place_rows(p.q_len, p.total_q, p.head_q, p.dim_qk, Use::kOutput);
  dk = place_rows(p.kv_len, p.total_kv, p.head_kv, p.dim_qk, Use::kOutput);
  dv = place_rows(p.kv_len, p.total_kv, p.head_kv, p.dim_v, Use::kOutput);
  if (inputs.bias.given() && random.chance(60)) {
    const auto& n = inputs.bias.sizes;
    dbias = place(random.chance(50) ? inputs.bias.dtype : DType::kF32, {n[0], n[1], n[2], n[3]},
                  Use::kOutput);
  }
  if (inputs.sink.given() && random.chance(60)) dsink = place(wide, {p.head_q}, Use::kOutput);
}

void Subject::list_arguments() {
  const DType own = problem.dtype;
  const DType wide = own == DType::kF64 ? DType::kF64 : DType::kF32;
  const Use result = pass == Pass::kForward ? Use::kOutput : Use::kInput;
  const bool forward = pass == Pass::kForward;
  arguments = {
      {"q", &inputs.q, Use::kInput, {own}},
      {"k", &inputs.k, Use::kInput, {own}},
      {"v", &inputs.v, Use::kInput, {own}},
      {"bias", &inputs.bias, Use::kInput, {own, DType::kF32}, true},
      {"mask", &inputs.mask, Use::kInput, {DType::kBool}, true},
      {"alibi_slopes", &inputs.alibi_slopes, Use::kInput, {wide}},
      {"sink", &inputs.sink, Use::kInput, {wide}},
      {"key_lengths", &inputs.key_lengths, Use::kInput, {DType::kI32}, false, true},
      {"cu_seqlens_q", &inputs.cu_seqlens_q, Use::kInput, {DType::kI32}},
      {"cu_seqlens_kv", &inputs.cu_seqlens_kv, Use::kInput, {DType::kI32}},
      {"out", &out, result, {own}},
      {"lse", &lse, result, {wide}, false, true, forward},
  };
  if (forward) return;
  arguments.insert(
      arguments.end(),
      {{"dout", &dout, Use::kInput, {own}},
       {"dlse", &dlse, Use::kInput, {wide}, false, true, true},
       {"dq", &dq, Use::kOutput, {own}},
       {"dk", &dk, Use::kOutput, {own}},
       {"dv", &dv, Use::kOutput, {own}},
       {"dbias", &dbias, Use::kOutput, {inputs.bias.dtype, DType::kF32}, false, false, true},
       {"dsink", &dsink, Use::kOutput, {wide}, false, false, true}});
}

std::vector<Argument> Subject::given() const {
  std::vector<Argument> there;
  for (const Argument& a : arguments) {
    if (a.view->given()) there.push_back(a);
  }
  return there;
}

Argument& Subject::argument(const std::string& name) {
  return *std::find_if(arguments.begin(), arguments.end(),
                       [&](const Argument& a) { return a.name == name; });
}

Status Subject::run() const {
  const Result<Plan> plan = make_plan(problem, Device::cpu(), options);
  if (!plan.ok()) return plan.status();
  if (pass == Pass::kForward) {
    ForwardTensors t;
    static_cast<AttentionInputs&>(t) = inputs;
    t.out = out;
    t.lse = lse;
    return plan->forward(t, workspace);
  }
  BackwardTensors t;
  static_cast<AttentionInputs&>(t) = inputs;
  t.out = out;
  t.lse = lse;
  t.dout = dout;
  t.dlse = dlse;
  t.dq = dq;
  t.dk = dk;
  t.dv = dv;
  t.dbias = dbias;
  t.dsink = dsink;
  return plan->backward(t, workspace);
}

}  // namespace fovea::invalid
