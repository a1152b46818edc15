// What a plan and a call refuse, and the exact words they use.
#include "api/check.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace fovea {
namespace {

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

AttentionProblem small_problem() {
  AttentionProblem p;
  p.batch = 2;
  p.head_q = 4;
  p.head_kv = 2;
  p.q_len = 3;
  p.kv_len = 5;
  p.dim_qk = 8;
  p.dim_v = 16;
  return p;
}

struct ProblemFault {
  void (*spoil)(AttentionProblem&);
  const char* message;
};

TEST(CheckProblemTest, Messages) {
  const double nan = std::nan(""), inf = std::numeric_limits<double>::infinity();
  ASSERT_TRUE(std::isnan(nan) && std::isinf(inf));
  const ProblemFault faults[] = {
      {[](auto& p) { p.batch = -1; }, "make_plan: batch is -1, must be at least 0"},
      {[](auto& p) { p.q_len = -2; }, "make_plan: q_len is -2, must be at least 0"},
      {[](auto& p) { p.kv_len = -3; }, "make_plan: kv_len is -3, must be at least 0"},
      {[](auto& p) { p.head_q = 0; }, "make_plan: head_q is 0, must be at least 1"},
      {[](auto& p) { p.head_kv = 0; }, "make_plan: head_kv is 0, must be at least 1"},
      {[](auto& p) { p.dim_qk = 0; }, "make_plan: dim_qk is 0, must be at least 1"},
      {[](auto& p) { p.dim_v = -1; }, "make_plan: dim_v is -1, must be at least 1"},
      {[](auto& p) { p.head_q = 30, p.head_kv = 8; },
       "make_plan: head_q is 30, must be a multiple of head_kv = 8"},
      {[](auto& p) { p.q_len = kHuge; },
       "make_plan: batch x q_len x head_q x dim is 2 x 9223372036854775807 x 4 x 16, must take "
       "less than 2^63 bytes as f64"},
      {[](auto& p) { p.kv_len = kHuge / 64; },
       "make_plan: batch x kv_len x head_kv x dim is 2 x 144115188075855871 x 2 x 16, must take "
       "less than 2^63 bytes as f64"},
      {[](auto& p) { p.dtype = DType::kI32; },
       "make_plan: dtype is i32, must be f32, f16, bf16 or f64"},
      {[](auto& p) { p.dtype = static_cast<DType>(50); },
       "make_plan: dtype is dtype 50, must be f32, f16, bf16 or f64"},
      {[](auto& p) { p.features = static_cast<Feature>(65); },
       "make_plan: features is bias | bits 64, must be a combination of bias, mask, key_lengths, "
       "alibi_slopes and sink"},
      {[](auto& p) { p.layout = static_cast<Layout>(2); },
       "make_plan: layout is 2, must be kDense (0) or kPacked (1)"},
      {[](auto& p) { p.total_q = 6; }, "make_plan: total_q is 6, must be 0 in the dense layout"},
      {[](auto& p) { p.layout = Layout::kPacked, p.total_q = 7; },
       "make_plan: total_q is 7, must be at most batch * q_len = 6"},
      {[](auto& p) { p.layout = Layout::kPacked, p.total_kv = -1; },
       "make_plan: total_kv is -1, must be at least 0"},
      {[](auto& p) { p.layout = Layout::kPacked, p.features = Feature::kKeyLengths; },
       "make_plan: features is key_lengths, must not hold key_lengths in the packed layout: "
       "cu_seqlens_kv gives them"},
      {[](auto& p) { p.mask.left = -2; },
       "make_plan: mask.left is -2, must be at least 0, or -1 for unbounded"},
      {[](auto& p) { p.mask.right = -5; },
       "make_plan: mask.right is -5, must be at least 0, or -1 for unbounded"},
      {[](auto& p) { p.mask.prefix = -1; }, "make_plan: mask.prefix is -1, must be at least 0"},
      {[](auto& p) { p.scale = HUGE_VAL; }, "make_plan: scale is inf, must be finite"},
      {[](auto& p) { p.softcap = -0.5; },
       "make_plan: softcap is -0.5, must be finite and at least 0"},
      {[](auto& p) { p.dropout = 1; }, "make_plan: dropout is 1, must be in [0, 1)"},
      {[](auto& p) { p.dropout = std::nan(""); }, "make_plan: dropout is nan, must be in [0, 1)"},
      {[](auto& p) { p.logit_bound = 0.0; },
       "make_plan: logit_bound is 0, must be finite and above 0"},
  };
  for (const ProblemFault& fault : faults) {
    AttentionProblem p = small_problem();
    ASSERT_TRUE(check_problem(p).ok());
    fault.spoil(p);
    const Status s = check_problem(p);
    EXPECT_EQ(s.code(), StatusCode::kInvalidArgument) << fault.message;
    EXPECT_EQ(s.message(), fault.message);
  }
}

TEST(CheckProblemTest, LegalExtremes) {
  AttentionProblem p = small_problem();
  p.batch = p.q_len = p.kv_len = 0;
  EXPECT_TRUE(check_problem(p).ok());
  p = small_problem();
  p.q_len = int64_t{1} << 40;  // far past 2^31 elements
  p.mask = Mask::window(kHuge, kHuge).with_prefix(kHuge);
  p.scale = -1e-30;
  p.dropout = 0.9999999999999999;
  EXPECT_TRUE(check_problem(p).ok());
}

// Every tensor of one small problem, all features on.
class CheckCallTest : public testing::Test {
 protected:
  CheckCallTest() {
    p_ = small_problem();
    p_.features = Feature::kBias | Feature::kBoolMask | Feature::kKeyLengths | Feature::kAlibi |
                  Feature::kSink;
    t_.q = make(DType::kF32, {2, 3, 4, 8});
    t_.k = make(DType::kF32, {2, 5, 2, 8});
    t_.v = make(DType::kF32, {2, 5, 2, 16});
    t_.bias = make(DType::kF32, {1, 4, 1, 5});
    t_.mask = make(DType::kBool, {2, 1, 3, 5});
    t_.key_lengths = make(DType::kI32, {2});
    t_.alibi_slopes = make(DType::kF32, {4});
    t_.sink = make(DType::kF32, {4});
    t_.out = make(DType::kF32, {2, 3, 4, 16});
    t_.lse = make(DType::kF32, {2, 4, 3});
    t_.dout = make(DType::kF32, {2, 3, 4, 16});
    t_.dq = make(DType::kF32, {2, 3, 4, 8});
    t_.dk = make(DType::kF32, {2, 5, 2, 8});
    t_.dv = make(DType::kF32, {2, 5, 2, 16});
    t_.dbias = make(DType::kF32, {1, 4, 1, 5});
    t_.dsink = make(DType::kF32, {4});
  }

  TensorView make(DType dtype, std::initializer_list<int64_t> sizes) {
    TensorView t = TensorView::contiguous(nullptr, dtype, sizes);
    memory_.emplace_back(static_cast<size_t>(t.elements()));  // zeros: key lengths are legal
    t.data = memory_.back().data();
    return t;
  }

  std::string refusal() const {
    const Status s = check_backward(p_, Device::cpu(), t_);
    EXPECT_EQ(s.code(), StatusCode::kInvalidArgument);
    return s.message();
  }

  AttentionProblem p_;
  BackwardTensors t_;
  std::vector<std::vector<double>> memory_;
};

TEST_F(CheckCallTest, GoodTensorsPass) {
  const Status backward = check_backward(p_, Device::cpu(), t_);
  EXPECT_TRUE(backward.ok()) << backward.message();
  ForwardTensors forward;
  static_cast<AttentionInputs&>(forward) = t_;
  forward.out = t_.out;
  EXPECT_TRUE(check_forward(p_, Device::cpu(), forward).ok()) << "lse is optional";
}

TEST_F(CheckCallTest, Shapes) {
  t_.k.sizes[3] = 96;
  EXPECT_EQ(refusal(), "backward: k.dim_qk is 96, must equal problem.dim_qk = 8");
  t_.k.sizes[3] = 8;
  t_.bias.sizes[1] = 3;
  EXPECT_EQ(refusal(), "backward: bias.head_q is 3, must be 1 or problem.head_q = 4");
  t_.bias.sizes[1] = 4;
  t_.bias.sizes[3] = 1;
  EXPECT_EQ(refusal(), "backward: bias.kv_len is 1, must equal problem.kv_len = 5");
  t_.bias.sizes[3] = 5;
  t_.dbias.sizes[2] = 3;
  EXPECT_EQ(refusal(), "backward: dbias.q_len is 3, must equal bias.q_len = 1");
  t_.dbias.sizes[2] = 1;
  t_.alibi_slopes.rank = 3;
  EXPECT_EQ(refusal(), "backward: alibi_slopes.rank is 3, must be 1 or 2");
  t_.alibi_slopes.rank = 1;
  t_.q.rank = -1;
  EXPECT_EQ(refusal(),
            "backward: q.rank is -1, must be 4 (-1 is a view of a type, device or rank that fovea "
            "lacks)");
}

TEST_F(CheckCallTest, Presence) {
  BackwardTensors good = t_;
  t_.dk = {};
  EXPECT_EQ(refusal(), "backward: dk is not given, must be given");
  t_ = good;
  t_.sink = {};
  EXPECT_EQ(refusal(), "backward: sink is not given but the problem has sink");
  t_ = good;
  t_.cu_seqlens_q = t_.key_lengths;
  EXPECT_EQ(refusal(), "backward: cu_seqlens_q is given but the problem has no packed layout");
  t_ = good;
  p_.features = Feature::kBoolMask | Feature::kKeyLengths | Feature::kAlibi | Feature::kSink;
  EXPECT_EQ(refusal(), "backward: bias is given but the problem has no bias");
  t_.bias = {};
  EXPECT_EQ(refusal(), "backward: dbias is given but the problem has no bias");
}

TEST_F(CheckCallTest, DtypesAndDevices) {
  t_.mask.dtype = DType::kI32;
  EXPECT_EQ(refusal(), "backward: mask.dtype is i32, must be bool");
  t_.mask.dtype = DType::kBool;
  p_.dtype = DType::kF64;
  EXPECT_EQ(refusal(), "backward: q.dtype is f32, must be f64");
  p_.dtype = DType::kF32;
  t_.bias.dtype = DType::kBf16;
  EXPECT_EQ(refusal(), "backward: bias.dtype is bf16, must be f32");
  t_.bias.dtype = DType::kF32;
  t_.v.device = Device::cuda(1);
  EXPECT_EQ(refusal(), "backward: v.device is cuda:1, must be cpu");
}

TEST_F(CheckCallTest, Strides) {
  BackwardTensors good = t_;
  t_.v.strides[3] = 2;
  EXPECT_EQ(refusal(), "backward: v.strides[3] is 2, must be 1 in the last dimension");
  t_ = good;
  t_.q.strides[0] = -96;
  EXPECT_EQ(refusal(), "backward: q.strides[0] is -96, must be at least 0");
  t_ = good;
  t_.k.strides[1] = kHuge / 4;
  EXPECT_EQ(refusal(),
            "backward: k.strides[1] is 2305843009213693951, must keep the tensor's extent under "
            "2^63 bytes");
  t_.k.strides[1] = kHuge / 16;  // 2^61 elements fit, their 2^63 bytes do not
  EXPECT_EQ(refusal(),
            "backward: k.strides[1] is 576460752303423487, must keep the tensor's extent under "
            "2^63 bytes");
  t_ = good;
  t_.k.strides[0] = 0;  // an expanded input is legal, an expanded output is not
  EXPECT_TRUE(check_backward(p_, Device::cpu(), t_).ok());
  t_.dk.strides[0] = 0;
  EXPECT_EQ(refusal(),
            "backward: dk.strides[0] is 0, must be above 0: an output's elements may not share "
            "memory");
  t_ = good;
  t_.dv.strides[1] = 31;  // rows of 32 elements overlap by one
  EXPECT_EQ(refusal(),
            "backward: dv.strides[1] is 31, must be above 31: an output's elements may not share "
            "memory");
  t_ = good;
  t_.bias.strides[0] = -12345;  // of a dimension of size 1: never stepped along
  EXPECT_TRUE(check_backward(p_, Device::cpu(), t_).ok());
}

TEST_F(CheckCallTest, Pointers) {
  BackwardTensors good = t_;
  t_.dv.data = nullptr;
  EXPECT_EQ(refusal(), "backward: dv.data is null, must point to memory: the tensor has elements");
  t_ = good;
  t_.dv.data = static_cast<char*>(t_.dv.data) + 2;
  EXPECT_NE(refusal().find("must be aligned to 4 bytes"), std::string::npos);
  t_ = good;
  t_.dq.data = t_.q.data;
  EXPECT_NE(refusal().find("backward: dq.data is 0x"), std::string::npos);
  EXPECT_NE(refusal().find("must not be that of q"), std::string::npos);
  t_ = good;
  t_.dsink.data = t_.dbias.data;
  EXPECT_NE(refusal().find("must not be that of dbias"), std::string::npos);
}

TEST_F(CheckCallTest, KeyLengths) {
  auto* lengths = static_cast<int32_t*>(t_.key_lengths.data);
  lengths[1] = 6;
  EXPECT_EQ(refusal(), "backward: key_lengths[1] is 6, must be in 0..5");
  lengths[1] = -1;
  EXPECT_EQ(refusal(), "backward: key_lengths[1] is -1, must be in 0..5");
  lengths[1] = 5;
  EXPECT_TRUE(check_backward(p_, Device::cpu(), t_).ok());
}

TEST_F(CheckCallTest, EmptyTensorsNeedNoMemory) {
  p_.batch = 0;
  BackwardTensors empty = t_;
  for (TensorView* t : {&empty.q, &empty.k, &empty.v, &empty.mask, &empty.key_lengths, &empty.out,
                        &empty.lse, &empty.dout, &empty.dq, &empty.dk, &empty.dv}) {
    t->sizes[0] = 0;
    t->data = nullptr;
  }
  const Status s = check_backward(p_, Device::cpu(), empty);
  EXPECT_TRUE(s.ok()) << s.message();
}

// A packed problem of two sequences, forward only.
class CheckPackedTest : public testing::Test {
 protected:
  CheckPackedTest() {
    p_ = small_problem();
    p_.layout = Layout::kPacked;
    p_.total_q = 4;
    p_.total_kv = 6;
    t_.q = TensorView::contiguous(q_, DType::kF32, {4, 4, 8});
    t_.k = TensorView::contiguous(k_, DType::kF32, {6, 2, 8});
    t_.v = TensorView::contiguous(v_, DType::kF32, {6, 2, 16});
    t_.out = TensorView::contiguous(out_, DType::kF32, {4, 4, 16});
    t_.lse = TensorView::contiguous(lse_, DType::kF32, {4, 4});
    t_.cu_seqlens_q = TensorView::contiguous(cu_q_, DType::kI32, {3});
    t_.cu_seqlens_kv = TensorView::contiguous(cu_kv_, DType::kI32, {3});
  }

  std::string refusal() const {
    const Status s = check_forward(p_, Device::cpu(), t_);
    EXPECT_EQ(s.code(), StatusCode::kInvalidArgument);
    return s.message();
  }

  float q_[128], k_[96], v_[192], out_[256], lse_[16];
  int32_t cu_q_[3] = {0, 3, 4}, cu_kv_[3] = {0, 1, 6};
  AttentionProblem p_;
  ForwardTensors t_;
};

TEST_F(CheckPackedTest, Bounds) {
  ASSERT_TRUE(check_forward(p_, Device::cpu(), t_).ok());
  cu_q_[0] = 1;
  EXPECT_EQ(refusal(), "forward: cu_seqlens_q[0] is 1, must be 0");
  cu_q_[0] = 0;
  cu_q_[1] = 5;
  EXPECT_EQ(refusal(),
            "forward: cu_seqlens_q[1] is 5, must be at most q_len = 3 above cu_seqlens_q[0] = 0");
  cu_q_[1] = 3;
  cu_q_[2] = 2;
  EXPECT_EQ(refusal(), "forward: cu_seqlens_q[2] is 2, must be at least cu_seqlens_q[1] = 3");
  cu_q_[2] = 5;
  EXPECT_EQ(refusal(), "forward: cu_seqlens_q[2] is 5, must equal problem.total_q = 4");
  cu_q_[2] = 4;
  t_.cu_seqlens_kv.sizes[0] = 2;
  EXPECT_EQ(refusal(), "forward: cu_seqlens_kv.batch + 1 is 2, must equal problem.batch + 1 = 3");
}

TEST(CheckWorkspaceTest, SizeAndAlignment) {
  alignas(64) char memory[256];
  EXPECT_TRUE(check_workspace("forward", {}, 0).ok());
  EXPECT_TRUE(check_workspace("forward", {memory, 128}, 128).ok());
  EXPECT_EQ(check_workspace("forward", {nullptr, 128}, 128).message(),
            "forward: workspace.data is null, must point to 128 bytes");
  EXPECT_EQ(check_workspace("forward", {memory, 127}, 128).message(),
            "forward: workspace.bytes is 127, must be at least 128");
  EXPECT_NE(check_workspace("forward", {memory + 8, 128}, 128)
                .message()
                .find("must be aligned to 64 bytes"),
            std::string::npos);
}

}  // namespace
}  // namespace fovea
