// The one-call conveniences, and problems that have nothing to attend to.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "backend/cuda/device.h"
#include "fovea/plan.h"

namespace fovea {
namespace {

// batch 2, two heads over one KV head, all floats.
class AttentionTest : public testing::Test {
 protected:
  void make(int64_t q_len, int64_t kv_len) {
    problem_.batch = 2;
    problem_.head_q = 2;
    problem_.head_kv = 1;
    problem_.q_len = q_len;
    problem_.kv_len = kv_len;
    problem_.dim_qk = 4;
    problem_.dim_v = 3;
    tensors_.q = place({2, q_len, 2, 4});
    tensors_.k = place({2, kv_len, 1, 4});
    tensors_.v = place({2, kv_len, 1, 3});
    tensors_.out = place({2, q_len, 2, 3});
    tensors_.lse = place({2, 2, q_len});
    tensors_.dout = place({2, q_len, 2, 3});
    tensors_.dq = place({2, q_len, 2, 4});
    tensors_.dk = place({2, kv_len, 1, 4});
    tensors_.dv = place({2, kv_len, 1, 3});
  }

  // 1, 2, 3 ... so that every element differs.
  TensorView place(std::initializer_list<int64_t> sizes) {
    TensorView t = TensorView::contiguous(nullptr, DType::kF32, sizes);
    std::vector<float>& values = memory_.emplace_back(static_cast<size_t>(t.elements()));
    for (size_t n = 0; n < values.size(); ++n) values[n] = static_cast<float>(n + 1);
    t.data = values.data();
    return t;
  }

  ForwardTensors forward_tensors() const {
    ForwardTensors t;
    static_cast<AttentionInputs&>(t) = tensors_;
    t.out = tensors_.out;
    t.lse = tensors_.lse;
    return t;
  }

  static const float* values(const TensorView& t) { return static_cast<const float*>(t.data); }

  AttentionProblem problem_;
  BackwardTensors tensors_;
  std::vector<std::vector<float>> memory_;
};

// One key: out is v, lse is scale * q . k, dv is the sum of dout, dq and dk vanish.
TEST_F(AttentionTest, OneKey) {
  make(1, 1);
  const Status forward = attention_forward(problem_, forward_tensors());
  ASSERT_TRUE(forward.ok()) << forward.message();
  const float *q = values(tensors_.q), *k = values(tensors_.k), *v = values(tensors_.v);
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t h = 0; h < 2; ++h) {
      double score = 0;
      for (int64_t d = 0; d < 4; ++d) score += double{q[(b * 2 + h) * 4 + d]} * k[b * 4 + d];
      EXPECT_NEAR(values(tensors_.lse)[b * 2 + h], score / 2, 1e-4);
      for (int64_t d = 0; d < 3; ++d) {
        EXPECT_FLOAT_EQ(values(tensors_.out)[(b * 2 + h) * 3 + d], v[b * 3 + d]);
      }
    }
  }
  const Status backward = attention_backward(problem_, tensors_);
  ASSERT_TRUE(backward.ok()) << backward.message();
  const float* dout = values(tensors_.dout);
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t d = 0; d < 3; ++d) {
      EXPECT_NEAR(values(tensors_.dv)[b * 3 + d], dout[b * 6 + d] + dout[b * 6 + 3 + d], 1e-3);
    }
    for (int64_t d = 0; d < 4; ++d) EXPECT_NEAR(values(tensors_.dk)[b * 4 + d], 0, 1e-2);
  }
}

TEST_F(AttentionTest, NoKeysGiveZeros) {
  make(3, 0);
  for (TensorView* t : {&tensors_.k, &tensors_.v, &tensors_.dk, &tensors_.dv}) t->data = nullptr;
  ASSERT_TRUE(attention_forward(problem_, forward_tensors()).ok());
  for (int64_t n = 0; n < 36; ++n) EXPECT_EQ(values(tensors_.out)[n], 0.0f);
  for (int64_t n = 0; n < 12; ++n) {
    EXPECT_EQ(values(tensors_.lse)[n], -std::numeric_limits<float>::infinity());
  }
  ASSERT_TRUE(attention_backward(problem_, tensors_).ok());
  for (int64_t n = 0; n < 48; ++n) EXPECT_EQ(values(tensors_.dq)[n], 0.0f);
}

TEST_F(AttentionTest, NoQueriesGiveZeroGradients) {
  make(0, 3);
  ASSERT_TRUE(attention_forward(problem_, forward_tensors()).ok());
  ASSERT_TRUE(attention_backward(problem_, tensors_).ok());
  for (int64_t n = 0; n < 24; ++n) EXPECT_EQ(values(tensors_.dk)[n], 0.0f);
  for (int64_t n = 0; n < 18; ++n) EXPECT_EQ(values(tensors_.dv)[n], 0.0f);
}

TEST_F(AttentionTest, RefusalsPassThrough) {
  make(2, 2);
  problem_.dropout = 1;
  EXPECT_EQ(attention_forward(problem_, forward_tensors()).message(),
            "make_plan: dropout is 1, must be in [0, 1)");
  problem_.dropout = 0;
  tensors_.lse = {};
  EXPECT_EQ(attention_backward(problem_, tensors_).message(),
            "backward: lse is not given, must be given");
  if (cuda_device_count() > 0) return;
  tensors_.q.device = Device::cuda(0);
  EXPECT_EQ(attention_forward(problem_, forward_tensors()).code(), StatusCode::kUnsupported);
}

// The same request is planned once: both plans are the same kernel with the same needs.
TEST_F(AttentionTest, PlansAreImmutableValues) {
  make(2, 2);
  const auto first = make_plan(problem_, Device::cpu());
  ASSERT_TRUE(first.ok());
  const Plan copy = *first;
  EXPECT_EQ(copy.kernel(), first->kernel());
  EXPECT_EQ(&copy.problem(), &first->problem());
  const auto again = make_plan(problem_, Device::cpu());
  EXPECT_EQ(&again->problem(), &first->problem()) << "the cache was not used";
}

}  // namespace
}  // namespace fovea
