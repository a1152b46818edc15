// The C API: a C program's use of it, null pointers, and errors that stay on their thread.
#include "fovea/c_api.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "backend/cuda/device.h"
#include "fovea/version.h"

extern "C" {
int c_consumer_forward(void);
int c_consumer_defaults(void);
}

namespace {

fovea_problem small_problem() {
  fovea_problem p = FOVEA_PROBLEM_INIT;
  p.batch = p.head_q = p.head_kv = 1;
  p.q_len = p.kv_len = 2;
  p.dim_qk = p.dim_v = 4;
  return p;
}

TEST(CApiTest, ConsumerInC) { EXPECT_EQ(c_consumer_forward(), 0) << fovea_last_error(); }
TEST(CApiTest, DefaultsInC) { EXPECT_EQ(c_consumer_defaults(), 0); }
TEST(CApiTest, Version) { EXPECT_STREQ(fovea_version(), fovea::version()); }

TEST(CApiTest, NullPointersAreRefused) {
  const fovea_problem p = small_problem();
  fovea_plan* plan = nullptr;
  EXPECT_EQ(fovea_plan_create(&p, nullptr, nullptr), FOVEA_INVALID_ARGUMENT);
  EXPECT_STREQ(fovea_last_error(), "fovea_plan_create: plan is null, must point to one");
  EXPECT_EQ(fovea_plan_create(nullptr, nullptr, &plan), FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(fovea_forward(nullptr, nullptr, nullptr, 0, nullptr), FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(fovea_backward(nullptr, nullptr, nullptr, 0, nullptr), FOVEA_INVALID_ARGUMENT);
  size_t bytes = 0;
  EXPECT_EQ(fovea_plan_workspace_bytes(nullptr, 0, &bytes), FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(fovea_merge(nullptr, 1, nullptr, nullptr, nullptr), FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(fovea_plan_explain(nullptr), nullptr);
  EXPECT_EQ(fovea_plan_backend(nullptr), nullptr);
  EXPECT_EQ(fovea_plan_kernel(nullptr), nullptr);
  fovea_plan_destroy(nullptr);
  fovea_problem_init(nullptr);
}

TEST(CApiTest, BadPlansGiveNoPlan) {
  fovea_problem p = small_problem();
  p.head_q = 3;
  p.head_kv = 2;
  auto* plan = reinterpret_cast<fovea_plan*>(&p);
  EXPECT_EQ(fovea_plan_create(&p, nullptr, &plan), FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(plan, nullptr);
  EXPECT_STREQ(fovea_last_error(), "make_plan: head_q is 3, must be a multiple of head_kv = 2");
  p = small_problem();
  p.dtype = 1000;
  EXPECT_EQ(fovea_plan_create(&p, nullptr, &plan), FOVEA_INVALID_ARGUMENT);
  p = small_problem();
  fovea_plan_options options = FOVEA_PLAN_OPTIONS_INIT;
  options.device_type = FOVEA_CUDA;
  if (fovea::cuda_device_count() == 0) {
    EXPECT_EQ(fovea_plan_create(&p, &options, &plan), FOVEA_UNSUPPORTED);
  }
  options.device_index = 1 << 20;  // no machine has so many
  EXPECT_EQ(fovea_plan_create(&p, &options, &plan),
            fovea::cuda_device_count() > 0 ? FOVEA_INVALID_ARGUMENT : FOVEA_UNSUPPORTED);
  options.device_type = 17;
  EXPECT_EQ(fovea_plan_create(&p, &options, &plan), FOVEA_INVALID_ARGUMENT);
}

TEST(CApiTest, PassMustBeOneOfTwo) {
  const fovea_problem p = small_problem();
  fovea_plan* plan = nullptr;
  ASSERT_EQ(fovea_plan_create(&p, nullptr, &plan), FOVEA_OK) << fovea_last_error();
  size_t bytes = 77;
  EXPECT_EQ(fovea_plan_workspace_bytes(plan, 2, &bytes), FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(bytes, 77u);
  EXPECT_EQ(fovea_plan_workspace_bytes(plan, FOVEA_PASS_BACKWARD, &bytes), FOVEA_OK);
  fovea_plan_destroy(plan);
}

TEST(CApiTest, HostMemory) {
  void* memory = &memory;
  EXPECT_EQ(fovea_host_memory_create(0, &memory), FOVEA_OK);
  EXPECT_EQ(memory, nullptr);
  memory = &memory;
  EXPECT_EQ(fovea_host_memory_create(SIZE_MAX / 2, &memory), FOVEA_OUT_OF_MEMORY);
  EXPECT_EQ(memory, nullptr);
  EXPECT_EQ(fovea_host_memory_create(1, nullptr), FOVEA_INVALID_ARGUMENT);
  fovea_host_memory_destroy(nullptr);
}

TEST(CApiTest, ErrorsStayOnTheirThread) {
  EXPECT_EQ(fovea_forward(nullptr, nullptr, nullptr, 0, nullptr), FOVEA_INVALID_ARGUMENT);
  const std::string here = fovea_last_error();
  std::string there = "unset";
  std::thread([&] { there = fovea_last_error(); }).join();
  EXPECT_EQ(there, "");
  EXPECT_EQ(fovea_last_error(), here);
}

TEST(CApiTest, ContiguousTensor) {
  const int64_t sizes[] = {2, 3, 4};
  const fovea_tensor t = fovea_tensor_contiguous(nullptr, FOVEA_BF16, 3, sizes);
  EXPECT_EQ(t.rank, 3);
  EXPECT_EQ(t.strides[0], 12);
  EXPECT_EQ(t.strides[2], 1);
  EXPECT_EQ(fovea_tensor_contiguous(nullptr, FOVEA_F32, 5, sizes).rank, -1);
  EXPECT_EQ(fovea_tensor_contiguous(nullptr, FOVEA_F32, 2, nullptr).rank, -1);
}

// Backward through C: with one key the softmax is constant, so dq and dk vanish and dv is dout.
TEST(CApiTest, BackwardOfOneKey) {
  fovea_problem p = small_problem();
  p.q_len = p.kv_len = 1;
  fovea_plan_options options = FOVEA_PLAN_OPTIONS_INIT;
  options.backend = "reference";
  fovea_plan* plan = nullptr;
  ASSERT_EQ(fovea_plan_create(&p, &options, &plan), FOVEA_OK) << fovea_last_error();
  float q[4] = {1, 2, 3, 4}, k[4] = {1, 0, 1, 0}, v[4] = {5, 6, 7, 8}, lse[1] = {2.0f};
  float dout[4] = {1, -1, 2, 3}, dq[4], dk[4], dv[4];
  const int64_t sizes[] = {1, 1, 1, 4};
  const auto view = [&](float* data) { return fovea_tensor_contiguous(data, FOVEA_F32, 4, sizes); };
  fovea_backward_tensors t = FOVEA_BACKWARD_TENSORS_INIT;
  t.inputs.q = view(q);
  t.inputs.k = view(k);
  t.inputs.v = view(v);
  t.out = view(v);
  t.dout = view(dout);
  t.dq = view(dq);
  t.dk = view(dk);
  t.dv = view(dv);
  t.lse = fovea_tensor_contiguous(lse, FOVEA_F32, 3, sizes);
  size_t bytes = 0;
  ASSERT_EQ(fovea_plan_workspace_bytes(plan, FOVEA_PASS_BACKWARD, &bytes), FOVEA_OK);
  void* memory = nullptr;
  ASSERT_EQ(fovea_host_memory_create(bytes, &memory), FOVEA_OK) << fovea_last_error();
  ASSERT_EQ(fovea_backward(plan, &t, memory, bytes, nullptr), FOVEA_OK) << fovea_last_error();
  fovea_host_memory_destroy(memory);
  for (int d = 0; d < 4; ++d) {
    EXPECT_NEAR(dq[d], 0, 1e-6);
    EXPECT_NEAR(dk[d], 0, 1e-6);
    EXPECT_NEAR(dv[d], dout[d], 1e-6);
  }
  fovea_plan_destroy(plan);
}

TEST(CApiTest, Merge) {
  float a[2] = {1, 3}, b[2] = {3, 5}, out[2] = {0, 0}, lse_a[1] = {0}, lse_b[1] = {0}, lse[1] = {0};
  const int64_t sizes[] = {1, 1, 1, 2};
  const auto view = [&](float* data, int rank) {
    return fovea_tensor_contiguous(data, FOVEA_F32, rank, sizes);
  };
  const fovea_partial_result parts[] = {{view(a, 4), view(lse_a, 3)}, {view(b, 4), view(lse_b, 3)}};
  const fovea_tensor out_view = view(out, 4), lse_view = view(lse, 3);
  ASSERT_EQ(fovea_merge(parts, 2, &out_view, &lse_view, nullptr), FOVEA_OK) << fovea_last_error();
  EXPECT_FLOAT_EQ(out[0], 2);
  EXPECT_FLOAT_EQ(out[1], 4);
  EXPECT_FLOAT_EQ(lse[0], std::log(2.0f));
  EXPECT_EQ(fovea_merge(parts, 0, &out_view, &lse_view, nullptr), FOVEA_INVALID_ARGUMENT);
}

}  // namespace
