// Tensors that reach past 2^31 elements: the same problem with strides so large that batch members,
// heads or rows lie gigabytes apart gives the bits of the problem laid out densely. Between them is
// NaN, so that an address cut to 32 bits reads that, or fails.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>

#include "harness/device_tensors.h"
#include "support/engines.h"
#include "support/values.h"

namespace fovea::test {
namespace {

using harness::Case;
using harness::CaseTensors;

class Far : public EveryEngine {};

constexpr int64_t kPast31 = (int64_t{1} << 31) + 64;  // elements, and rows keep their alignment
constexpr int64_t kFarRow = (int64_t{1} << 25) + 64;  // 65 rows of it are past 2^31
constexpr size_t kSpareBytes = size_t{2} << 30;       // left to others

enum class Apart { kBatch, kHead, kRow };

// Where the batch, row and head of a dense [batch, row, head, dim] or packed [row, head, dim] view
// stand among its dimensions, and those of lse, [batch, head, row] or [head, row].
struct Axes {
  int batch, row, head;  // -1: none
};

Axes axes_of(const TensorView& t, bool is_lse) {
  if (is_lse) return t.rank == 3 ? Axes{0, 2, 1} : Axes{-1, 1, 0};
  return t.rank == 4 ? Axes{0, 1, 2} : Axes{-1, 0, 1};
}

// One block of device memory in which views of any number of tensors interleave: each has a place
// of its own in the first stretch, and steps from stretch to stretch along the axis that is apart.
class FarMemory {
 public:
  explicit FarMemory(Apart apart) : apart_(apart) {}

  // The host's view with far strides, its memory still to come.
  TensorView place(const TensorView& host, bool is_lse) {
    if (!host.given()) return host;
    TensorView t = host;
    t.device = Device::cuda(0);
    const Axes axes = axes_of(host, is_lse);
    const int far = apart_ == Apart::kBatch  ? axes.batch
                    : apart_ == Apart::kHead ? axes.head
                                             : axes.row;
    int64_t dense = 1;
    for (int i = t.rank - 1; i >= 0; --i) {
      const auto at = static_cast<size_t>(i);
      if (i == far) continue;
      t.strides[at] = dense;
      dense *= t.sizes[at];
    }
    const int64_t step = apart_ == Apart::kRow ? kFarRow : kPast31;
    t.strides[static_cast<size_t>(far)] = step;
    const int64_t bytes = dtype_bytes(t.dtype);
    t.data = reinterpret_cast<void*>(next_);  // an offset until bind()
    const int64_t last = (t.sizes[static_cast<size_t>(far)] - 1) * step + dense;
    end_ = std::max(end_, next_ + static_cast<size_t>(last * bytes));
    next_ += static_cast<size_t>((dense * bytes + 255) / 256 * 256);
    return t;
  }

  size_t bytes() const { return end_; }
  Status reserve() { return block_.reserve(end_, 0); }
  Status poison() const {
    return cudaMemset(block_.data(), harness::kPoisonByte, end_) == cudaSuccess
               ? Status()
               : Status(StatusCode::kInternal, "cudaMemset failed");
  }
  void bind(TensorView& t) const {
    if (t.given()) t.data = block_.data() + reinterpret_cast<uintptr_t>(t.data);
  }

 private:
  Apart apart_;
  size_t next_ = 256, end_ = 0;  // not from 0: a view without memory is one not given
  harness::DeviceBlock block_;
};

// Copies row by row between views of the same sizes; a scalar is a row of one.
void copy_rows(const TensorView& from, const TensorView& to, bool is_lse, cudaMemcpyKind kind) {
  std::array<int64_t, 4> n{1, 1, 1, 1}, a{}, b{};
  const int rows = is_lse ? from.rank : from.rank - 1;
  for (int i = 0; i < rows; ++i) {
    const auto at = static_cast<size_t>(i);
    n[at] = from.sizes[at];
    a[at] = from.strides[at];
    b[at] = to.strides[at];
  }
  const int64_t bytes = dtype_bytes(from.dtype);
  const int64_t length = is_lse ? 1 : from.sizes[static_cast<size_t>(from.rank - 1)];
  for (int64_t x = 0; x < n[0]; ++x) {
    for (int64_t y = 0; y < n[1]; ++y) {
      for (int64_t z = 0; z < n[2]; ++z) {
        const auto* source =
            static_cast<const char*>(from.data) + (x * a[0] + y * a[1] + z * a[2]) * bytes;
        auto* target = static_cast<char*>(to.data) + (x * b[0] + y * b[1] + z * b[2]) * bytes;
        ASSERT_EQ(cudaMemcpy(target, source, static_cast<size_t>(length * bytes), kind),
                  cudaSuccess);
      }
    }
  }
}

// Both passes of a case on far memory; the outputs come back to the host's tensors.
class FarCase {
 public:
  FarCase(const Case& c, Apart apart) : host_(c), memory_(apart), t_(host_.backward()) {
    for (TensorView* view : rows()) *view = memory_.place(*view, false);
    for (TensorView* view : scalars()) *view = memory_.place(*view, true);
  }

  size_t bytes() const { return memory_.bytes(); }
  const CaseTensors& host() const { return host_; }

  void run(const Engine& engine, const Plan& plan) {
    for (const Status& s : {memory_.reserve(), memory_.poison(), near_.upload()}) {
      ASSERT_TRUE(s.ok()) << s.message();
    }
    for (TensorView* view : rows()) memory_.bind(*view);
    for (TensorView* view : scalars()) memory_.bind(*view);
    const BackwardTensors& here = host_.backward();
    for (const auto& [from, to] : {std::pair(here.q, t_.q), std::pair(here.k, t_.k),
                                   std::pair(here.v, t_.v), std::pair(here.dout, t_.dout)}) {
      copy_rows(from, to, false, cudaMemcpyHostToDevice);
    }
    // Lengths are short lists: they stay as they are.
    t_.cu_seqlens_q = near_.backward().cu_seqlens_q;
    t_.cu_seqlens_kv = near_.backward().cu_seqlens_kv;
    ForwardTensors forward;
    static_cast<AttentionInputs&>(forward) = t_;
    forward.out = t_.out;
    forward.lse = t_.lse;
    const int index = engine.device.index;
    harness::DeviceWorkspace space(plan.workspace_bytes(Pass::kForward), index);
    harness::DeviceWorkspace back(plan.workspace_bytes(Pass::kBackward), index);
    for (const Status& s : {space.fill(harness::kPoisonByte), back.fill(harness::kPoisonByte),
                            plan.forward(forward, space.view()), plan.backward(t_, back.view()),
                            harness::wait_for_device(index)}) {
      ASSERT_TRUE(s.ok()) << s.message();
    }
    for (const auto& [from, to] : {std::pair(t_.out, here.out), std::pair(t_.dq, here.dq),
                                   std::pair(t_.dk, here.dk), std::pair(t_.dv, here.dv)}) {
      copy_rows(from, to, false, cudaMemcpyDeviceToHost);
    }
    copy_rows(t_.lse, here.lse, true, cudaMemcpyDeviceToHost);
  }

 private:
  std::array<TensorView*, 8> rows() {
    return {&t_.q, &t_.k, &t_.v, &t_.out, &t_.dout, &t_.dq, &t_.dk, &t_.dv};
  }
  std::array<TensorView*, 1> scalars() { return {&t_.lse}; }

  CaseTensors host_;
  harness::DeviceTensors near_{host_, 0};
  FarMemory memory_;
  BackwardTensors t_;
};

void expect_as_near(const Engine& engine, const std::string& text, Apart apart) {
  const Case c = must_parse(text + " deterministic pass=fwd,bwd");
  const std::string why = reproduce(engine, c);
  CaseTensors near(c);
  run(engine, c, near);
  if (testing::Test::HasFatalFailure()) return;
  FarCase far(c, apart);
  size_t free = 0, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  if (free < far.bytes() + kSpareBytes) {
    GTEST_SKIP() << far.bytes() << " bytes apart and " << kSpareBytes
                 << " to spare are needed, and the GPU has " << free << " free";
  }
  far.run(engine, plan_on(engine, c.problem));
  if (testing::Test::HasFatalFailure()) return;
  const BackwardTensors &a = far.host().backward(), &b = near.backward();
  EXPECT_EQ(bits_of(a.out), bits_of(b.out)) << why;
  EXPECT_EQ(bits_of(a.lse), bits_of(b.lse)) << why;
  EXPECT_EQ(bits_of(a.dq), bits_of(b.dq)) << why;
  EXPECT_EQ(bits_of(a.dk), bits_of(b.dk)) << why;
  EXPECT_EQ(bits_of(a.dv), bits_of(b.dv)) << why;
}

TEST_P(Far, BatchMembersPast31Bits) {
  expect_as_near(GetParam(), "b=2 hq=4 hkv=2 q=70 kv=130 d=64 mask=causal dtype=bf16",
                 Apart::kBatch);
}

TEST_P(Far, HeadsPast31Bits) {
  expect_as_near(GetParam(), "b=1 hq=2 hkv=2 q=70 kv=130 d=64 mask=causal dtype=bf16",
                 Apart::kHead);
}

TEST_P(Far, RowsPast31Bits) {
  expect_as_near(GetParam(), "b=1 hq=4 hkv=2 q=70 kv=130 d=64 mask=causal dtype=bf16", Apart::kRow);
}

TEST_P(Far, PackedRowsPast31Bits) {
  expect_as_near(GetParam(),
                 "b=3 hq=4 hkv=2 q=64 kv=64 d=64 mask=causal varlen q_lens=40,64,3 "
                 "kv_lens=64,60,5 dtype=f16",
                 Apart::kRow);
}

TEST_P(Far, RowsOfF32Past31Bits) {
  expect_as_near(GetParam(), "b=1 hq=2 hkv=1 q=70 kv=70 d=64 dtype=f32", Apart::kRow);
}

INSTANTIATE_TEST_SUITE_P(Engines, Far, testing::ValuesIn(fast_engines()), engine_name);

}  // namespace
}  // namespace fovea::test
