// The tensors of a case.
#include "harness/tensors.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "base/half.h"
#include "harness/fill.h"
#include "harness/random.h"

namespace fovea::harness {
namespace {

uint64_t hash_bytes(const std::byte* data, size_t bytes) {
  uint64_t lanes[4] = {1, 2, 3, 4};  // independent chains, so that the loop keeps up with memory
  size_t at = 0;
  for (; at + 32 <= bytes; at += 32) {
    for (size_t lane = 0; lane < 4; ++lane) {
      uint64_t word;
      std::memcpy(&word, data + at + 8 * lane, 8);
      lanes[lane] = (lanes[lane] ^ word) * 0x9E3779B97F4A7C15u;
      lanes[lane] ^= lanes[lane] >> 29;
    }
  }
  for (; at < bytes; ++at) lanes[0] = hash64(lanes[0] ^ static_cast<uint64_t>(data[at]));
  return hash64(lanes[0] ^ hash64(lanes[1] ^ hash64(lanes[2] ^ hash64(lanes[3]))));
}

bool all_canary(const std::byte* data, size_t bytes) {
  return std::all_of(data, data + bytes, [](std::byte b) { return b == GuardedBuffer::kCanary; });
}

// Calls visit(first byte of the row) for every row along the last dimension.
template <typename Visit>
void for_each_row(const TensorView& t, const Visit& visit) {
  std::array<int64_t, 3> sizes{1, 1, 1}, strides{};
  for (int i = 0; i + 1 < t.rank; ++i) {
    sizes[static_cast<size_t>(4 - t.rank + i)] = t.sizes[static_cast<size_t>(i)];
    strides[static_cast<size_t>(4 - t.rank + i)] = t.strides[static_cast<size_t>(i)];
  }
  auto* data = static_cast<std::byte*>(t.data);
  for (int64_t a = 0; a < sizes[0]; ++a) {
    for (int64_t b = 0; b < sizes[1]; ++b) {
      for (int64_t c = 0; c < sizes[2]; ++c) {
        visit(data + (a * strides[0] + b * strides[1] + c * strides[2]) * dtype_bytes(t.dtype));
      }
    }
  }
}

size_t row_bytes(const TensorView& t) {
  return static_cast<size_t>(t.sizes[static_cast<size_t>(t.rank - 1)] * dtype_bytes(t.dtype));
}

void poison(const TensorView& t) {
  for_each_row(t, [&](std::byte* row) { std::memset(row, kPoisonByte, row_bytes(t)); });
}

std::byte* element(const TensorView& t, int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
  const int64_t at = i0 * t.strides[0] + i1 * t.strides[1] + i2 * t.strides[2] + i3 * t.strides[3];
  return static_cast<std::byte*>(t.data) + at * dtype_bytes(t.dtype);
}

}  // namespace

GuardedBuffer::GuardedBuffer(size_t bytes, MemoryKind kind) : bytes_(bytes) {
  if (kind == MemoryKind::kTensor) {
    block_.reset(static_cast<std::byte*>(std::aligned_alloc(64, block_bytes())));
  } else if (Result<HostMemory> memory = HostMemory::allocate(block_bytes()); memory.ok()) {
    block_.reset(static_cast<std::byte*>(memory->release()));
  }
  if (block_ == nullptr) throw std::bad_alloc();
  std::memset(block_.get(), static_cast<int>(kCanary), kGuardBytes);
  std::memset(data() + bytes, static_cast<int>(kCanary), block_bytes() - kGuardBytes - bytes);
}

size_t GuardedBuffer::block_bytes() const { return (bytes_ + 63) / 64 * 64 + 2 * kGuardBytes; }

bool GuardedBuffer::canaries_intact() const {
  if (block_ == nullptr) return true;
  return all_canary(block_.get(), kGuardBytes) &&
         all_canary(data() + bytes_, block_bytes() - kGuardBytes - bytes_);
}

OwnedWorkspace::OwnedWorkspace(size_t bytes) : buffer_(bytes, MemoryKind::kWorkspace) { poison(); }

void OwnedWorkspace::fill(int byte) { std::memset(buffer_.data(), byte, buffer_.bytes()); }

CaseTensors::CaseTensors(const Case& c)
    : case_(c), wide_(c.problem.dtype == DType::kF64 ? DType::kF64 : DType::kF32) {
  const AttentionProblem& p = c.problem;
  const bool packed = p.layout == Layout::kPacked;
  const int64_t rows_q = packed ? p.total_q : p.q_len;
  const int64_t rows_kv = packed ? p.total_kv : p.kv_len;
  AttentionInputs& in = forward_;
  in.q = add_rows(rows_q, p.head_q, p.dim_qk, Role::kInput);
  in.k = add_rows(rows_kv, p.head_kv, p.dim_qk, Role::kInput);
  in.v = add_rows(rows_kv, p.head_kv, p.dim_v, Role::kInput);
  fill_input(in.q, InputName::kQ, c);
  fill_input(in.k, InputName::kK, c);
  fill_input(in.v, InputName::kV, c);
  add_features();
  in.dropout = {hash64(c.seed), c.seed * 7};
  static_cast<AttentionInputs&>(backward_) = in;
  add_outputs();
  if (c.backward) add_gradients();
  accept_inputs();
  poison_outputs();
}

TensorView CaseTensors::add(DType dtype, const TensorView& shape, size_t elements, Role role) {
  Owned owned{GuardedBuffer(elements * static_cast<size_t>(dtype_bytes(dtype))), shape, role, 0};
  // Zero for inputs, so that padding has a value; canaries for outputs, so that padding is guarded.
  std::memset(owned.buffer.data(),
              role == Role::kInput ? 0 : static_cast<int>(GuardedBuffer::kCanary),
              owned.buffer.bytes());
  owned.view.data = owned.buffer.data();
  owned.view.dtype = dtype;
  owned_.push_back(std::move(owned));
  return owned_.back().view;
}

TensorView CaseTensors::add_plain(DType dtype, std::initializer_list<int64_t> sizes, Role role) {
  const TensorView shape = TensorView::contiguous(nullptr, dtype, sizes);
  return add(dtype, shape, static_cast<size_t>(shape.elements()), role);
}

TensorView CaseTensors::add_rows(int64_t rows, int64_t heads, int64_t dim, Role role) {
  const AttentionProblem& p = case_.problem;
  const int64_t width = dim + case_.pad;
  const bool bshd = case_.order == TensorOrder::kBshd;
  const int64_t row = bshd ? heads * width : width;
  const int64_t head = bshd ? width : rows * width;
  if (p.layout == Layout::kPacked) {
    const auto shape = TensorView::strided(nullptr, p.dtype, {rows, heads, dim}, {row, head, 1});
    return add(p.dtype, shape, static_cast<size_t>(rows * heads * width), role);
  }
  const auto shape = TensorView::strided(nullptr, p.dtype, {p.batch, rows, heads, dim},
                                         {rows * heads * width, row, head, 1});
  return add(p.dtype, shape, static_cast<size_t>(p.batch * rows * heads * width), role);
}

void CaseTensors::add_features() {
  const AttentionProblem& p = case_.problem;
  AttentionInputs& in = forward_;
  const auto scores = [&](DType dtype, const std::array<bool, 3>& one) {
    return add_plain(dtype,
                     {one[0] ? 1 : p.batch, one[1] ? 1 : p.head_q, one[2] ? 1 : p.q_len, p.kv_len},
                     Role::kInput);
  };
  if (has(p.features, Feature::kBias)) {
    in.bias = scores(case_.bias_f32 ? DType::kF32 : p.dtype, case_.bias_broadcast);
    fill_input(in.bias, InputName::kBias, case_);
  }
  if (has(p.features, Feature::kBoolMask)) {
    in.mask = scores(DType::kBool, case_.mask_broadcast);
    fill_input(in.mask, InputName::kMask, case_);
  }
  if (has(p.features, Feature::kAlibi)) {
    in.alibi_slopes = case_.alibi_per_batch ? add_plain(wide_, {p.batch, p.head_q}, Role::kInput)
                                            : add_plain(wide_, {p.head_q}, Role::kInput);
    fill_input(in.alibi_slopes, InputName::kAlibi, case_);
  }
  if (has(p.features, Feature::kSink)) {
    in.sink = add_plain(wide_, {p.head_q}, Role::kInput);
    fill_input(in.sink, InputName::kSink, case_);
  }
  const CaseLengths lengths = lengths_of(case_);
  if (has(p.features, Feature::kKeyLengths)) {
    in.key_lengths = add_plain(DType::kI32, {p.batch}, Role::kInput);
    std::copy(lengths.kv.begin(), lengths.kv.end(), static_cast<int32_t*>(in.key_lengths.data));
  }
  if (p.layout == Layout::kPacked) {
    const auto cumulative = [&](const std::vector<int32_t>& each) {
      const TensorView t = add_plain(DType::kI32, {p.batch + 1}, Role::kInput);
      auto* at = static_cast<int32_t*>(t.data);
      *at = 0;
      for (const int32_t length : each) {
        at[1] = at[0] + length;
        ++at;
      }
      return t;
    };
    in.cu_seqlens_q = cumulative(lengths.q);
    in.cu_seqlens_kv = cumulative(lengths.kv);
  }
}

void CaseTensors::add_outputs() {
  const AttentionProblem& p = case_.problem;
  const bool packed = p.layout == Layout::kPacked;
  forward_.out = add_rows(packed ? p.total_q : p.q_len, p.head_q, p.dim_v, Role::kOutput);
  forward_.lse = packed ? add_plain(wide_, {p.head_q, p.total_q}, Role::kOutput)
                        : add_plain(wide_, {p.batch, p.head_q, p.q_len}, Role::kOutput);
  backward_.out = forward_.out;
  backward_.lse = forward_.lse;
}

void CaseTensors::add_gradients() {
  const AttentionProblem& p = case_.problem;
  const bool packed = p.layout == Layout::kPacked;
  const int64_t rows_q = packed ? p.total_q : p.q_len;
  const int64_t rows_kv = packed ? p.total_kv : p.kv_len;
  backward_.dout = add_rows(rows_q, p.head_q, p.dim_v, Role::kInput);
  fill_input(backward_.dout, InputName::kDout, case_);
  if (case_.want_dlse) {
    backward_.dlse = packed ? add_plain(wide_, {p.head_q, p.total_q}, Role::kInput)
                            : add_plain(wide_, {p.batch, p.head_q, p.q_len}, Role::kInput);
    fill_input(backward_.dlse, InputName::kDlse, case_);
  }
  backward_.dq = add_rows(rows_q, p.head_q, p.dim_qk, Role::kGradient);
  backward_.dk = add_rows(rows_kv, p.head_kv, p.dim_qk, Role::kGradient);
  backward_.dv = add_rows(rows_kv, p.head_kv, p.dim_v, Role::kGradient);
  if (case_.want_dbias && forward_.bias.given()) {
    const TensorView& bias = forward_.bias;
    backward_.dbias = add(bias.dtype, bias, static_cast<size_t>(bias.elements()), Role::kGradient);
  }
  if (forward_.sink.given()) {
    backward_.dsink = add_plain(wide_, {p.head_q}, Role::kGradient);
  }
}

void CaseTensors::poison_outputs() {
  for (const Owned& o : owned_) {
    if (o.role != Role::kInput) poison(o.view);
  }
}

void CaseTensors::poison_gradients() {
  for (const Owned& o : owned_) {
    if (o.role == Role::kGradient) poison(o.view);
  }
}

bool CaseTensors::canaries_intact() const {
  bool intact = true;
  for (const Owned& o : owned_) {
    intact = intact && o.buffer.canaries_intact();
    if (o.role == Role::kInput) continue;
    const bool padded =
        static_cast<int64_t>(o.buffer.bytes()) != o.view.elements() * dtype_bytes(o.view.dtype);
    if (!padded) continue;
    const size_t row = row_bytes(o.view);
    const auto gap = static_cast<size_t>(case_.pad * dtype_bytes(o.view.dtype));
    for_each_row(o.view, [&](std::byte* at) { intact = intact && all_canary(at + row, gap); });
  }
  return intact;
}

bool CaseTensors::inputs_unchanged() const {
  return std::all_of(owned_.begin(), owned_.end(), [](const Owned& o) {
    return o.role != Role::kInput || o.hash == hash_bytes(o.buffer.data(), o.buffer.bytes());
  });
}

void CaseTensors::accept_inputs() {
  for (Owned& o : owned_) {
    if (o.role == Role::kInput) o.hash = hash_bytes(o.buffer.data(), o.buffer.bytes());
  }
}

size_t CaseTensors::bytes() const {
  size_t sum = 0;
  for (const Owned& o : owned_) sum += o.buffer.bytes();
  return sum;
}

std::vector<const GuardedBuffer*> CaseTensors::buffers() const {
  std::vector<const GuardedBuffer*> all;
  for (const Owned& o : owned_) all.push_back(&o.buffer);
  return all;
}

TensorView flat(const TensorView& t) {
  return TensorView::contiguous(t.data, t.dtype, {t.elements()});
}

double read_element(const TensorView& t, int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
  const std::byte* at = element(t, i0, i1, i2, i3);
  switch (t.dtype) {
    case DType::kF64: return *reinterpret_cast<const double*>(at);
    case DType::kF32: return static_cast<double>(*reinterpret_cast<const float*>(at));
    case DType::kBf16: return static_cast<double>(to_float(*reinterpret_cast<const Bf16*>(at)));
    case DType::kF16: return static_cast<double>(to_float(*reinterpret_cast<const F16*>(at)));
    case DType::kBool: return static_cast<double>(*reinterpret_cast<const uint8_t*>(at));
    case DType::kI32: return static_cast<double>(*reinterpret_cast<const int32_t*>(at));
  }
  return 0;
}

void write_element(const TensorView& t, double value, int64_t i0, int64_t i1, int64_t i2,
                   int64_t i3) {
  std::byte* at = element(t, i0, i1, i2, i3);
  switch (t.dtype) {
    case DType::kF64: *reinterpret_cast<double*>(at) = value; break;
    case DType::kF32: *reinterpret_cast<float*>(at) = static_cast<float>(value); break;
    case DType::kBf16: *reinterpret_cast<Bf16*>(at) = to_bf16(static_cast<float>(value)); break;
    case DType::kF16: *reinterpret_cast<F16*>(at) = to_f16(static_cast<float>(value)); break;
    case DType::kBool: *reinterpret_cast<uint8_t*>(at) = value != 0 ? 1 : 0; break;
    case DType::kI32: *reinterpret_cast<int32_t*>(at) = static_cast<int32_t>(value); break;
  }
}

}  // namespace fovea::harness
