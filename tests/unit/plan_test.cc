// The choice of an engine and what a plan says of it, on machines that need not exist.
#include "fovea/plan.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "backend/cuda/device.h"
#include "plan/build.h"
#include "plan/cache.h"
#include "plan/choose.h"
#include "plan/device.h"

namespace fovea {
namespace {

class FakeKernel : public BoundKernel {
 public:
  explicit FakeKernel(std::string name) : name_(std::move(name)) {}
  std::string name() const override { return name_; }
  std::string describe() const override { return "tile_q 8"; }
  size_t workspace_bytes(Pass pass) const override { return pass == Pass::kForward ? 64 : 128; }
  Status forward(const ForwardTensors&, Workspace, Stream) const override { return {}; }
  Status backward(const BackwardTensors&, Workspace, Stream) const override { return {}; }

 private:
  std::string name_;
};

// Takes dim_qk up to a limit.
class FakeBackend : public Backend {
 public:
  FakeBackend(const char* name, int64_t most) : name_(name), most_(most) {}
  const char* name() const override { return name_; }
  std::vector<std::string> refusals(const AttentionProblem& p, const DeviceInfo&) const override {
    if (p.dim_qk <= most_) return {};
    return {"dim_qk is " + std::to_string(p.dim_qk) + ", takes 1.." + std::to_string(most_)};
  }
  std::unique_ptr<BoundKernel> bind(const AttentionProblem&, const DeviceInfo& d) const override {
    return std::make_unique<FakeKernel>(std::string(name_) + "/" + d.isa);
  }

 private:
  const char* name_;
  int64_t most_;
};

// Takes everything, and would rather not.
class ReluctantBackend : public FakeBackend {
 public:
  using FakeBackend::FakeBackend;
  std::string reluctance(const AttentionProblem&, const DeviceInfo&) const override {
    return "others are faster";
  }
};

class PlanTest : public testing::Test {
 protected:
  PlanTest() {
    problem_.batch = 1;
    problem_.head_q = problem_.head_kv = 2;
    problem_.q_len = problem_.kv_len = 4;
    problem_.dim_qk = problem_.dim_v = 64;
    machine_.threads = 3;
    machine_.isa = "imagined";
  }

  FakeBackend fast_{"fast", 64}, wide_{"wide", 128}, reference_{"reference", 256};
  const Backend* const table_[3] = {&fast_, &wide_, &reference_};
  AttentionProblem problem_;
  DeviceInfo machine_;
};

TEST_F(PlanTest, ReluctantEngineLeavesAProblemToTheNext) {
  const ReluctantBackend reluctant("reluctant", 64);
  const Backend* const both[] = {&reluctant, &wide_};
  const auto choice = choose(problem_, machine_, "", both);
  ASSERT_TRUE(choice.ok());
  EXPECT_STREQ(choice->backend->name(), "wide");
  ASSERT_EQ(choice->passed_over.size(), 1u);
  EXPECT_EQ(choice->passed_over[0].reasons[0], "others are faster");
  EXPECT_STREQ(choose(problem_, machine_, "reluctant", both)->backend->name(), "reluctant");
  const Backend* const alone[] = {&reluctant};
  EXPECT_STREQ(choose(problem_, machine_, "", alone)->backend->name(), "reluctant");
}

TEST_F(PlanTest, TakesTheFirstThatDoesNotRefuse) {
  EXPECT_STREQ(choose(problem_, machine_, "", table_)->backend->name(), "fast");
  problem_.dim_qk = 100;
  const auto choice = choose(problem_, machine_, "", table_);
  ASSERT_TRUE(choice.ok());
  EXPECT_STREQ(choice->backend->name(), "wide");
  ASSERT_EQ(choice->passed_over.size(), 1u);
  EXPECT_EQ(choice->passed_over[0].reasons[0], "dim_qk is 100, takes 1..64");
}

TEST_F(PlanTest, TakesTheOneAskedFor) {
  const auto choice = choose(problem_, machine_, "reference", table_);
  ASSERT_TRUE(choice.ok());
  EXPECT_STREQ(choice->backend->name(), "reference");
  ASSERT_EQ(choice->passed_over.size(), 2u);
  EXPECT_EQ(choice->passed_over[0].reasons[0], "reference was asked for");
}

TEST_F(PlanTest, UnknownNameListsThoseThatExist) {
  const auto choice = choose(problem_, machine_, "fastest", table_);
  EXPECT_EQ(choice.status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(choice.status().message(),
            "make_plan: options.backend is \"fastest\", must be \"fast\", \"wide\" or "
            "\"reference\", or empty for the best");
}

TEST_F(PlanTest, NobodyTakesIt) {
  problem_.dim_qk = 320;
  const auto choice = choose(problem_, machine_, "", table_);
  EXPECT_EQ(choice.status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(choice.status().message(),
            "make_plan: no backend takes this problem on this device\n"
            "  fast       dim_qk is 320, takes 1..64\n"
            "  wide       dim_qk is 320, takes 1..128\n"
            "  reference  dim_qk is 320, takes 1..256");
}

TEST_F(PlanTest, OneAskedForRefusesWithAHint) {
  problem_.dim_qk = 200;
  const auto choice = choose(problem_, machine_, "wide", table_);
  EXPECT_EQ(choice.status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(choice.status().message(),
            "make_plan: backend \"wide\" does not take this problem\n"
            "  wide  dim_qk is 200, takes 1..128\n"
            "  hint: the reference backend does (backend = \"reference\"), slowly");
}

TEST_F(PlanTest, CudaIsUnsupportedWithoutADevice) {
  if (cuda_device_count() > 0) GTEST_SKIP() << "this machine has a CUDA device";
  const auto plan = make_plan(problem_, Device::cuda(0));
  EXPECT_EQ(plan.status().code(), StatusCode::kUnsupported);
  const bool built = cuda_version()[0] != '\0';
  const char* reason = built ? "no CUDA device was found" : "built without CUDA";
  EXPECT_NE(plan.status().message().find(reason), std::string::npos) << plan.status().message();
}

TEST_F(PlanTest, ExplainNamesTheChoiceAndThePassedOver) {
  problem_.dim_qk = 200;
  const auto plan = build_plan(problem_, machine_, "", table_);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(Plan(*plan).explain(),
            "kernel     reference/imagined\n"
            "how        tile_q 8\n"
            "workspace  forward 64 bytes, backward 128 bytes\n"
            "passed over\n"
            "  fast  dim_qk is 200, takes 1..64\n"
            "  wide  dim_qk is 200, takes 1..128\n");
  EXPECT_EQ(Plan(*plan).workspace_bytes(Pass::kBackward), 128u);
  EXPECT_EQ(Plan(*plan).problem(), problem_);
}

TEST_F(PlanTest, ThreadsComeFromTheCallThenTheVariableThenTheMachine) {
  EXPECT_EQ(*thread_count(5, "7", 9), 5);
  EXPECT_EQ(*thread_count(0, "7", 9), 7);
  EXPECT_EQ(*thread_count(0, "", 9), 9);
  EXPECT_EQ(*thread_count(0, nullptr, 9), 9);
}

TEST_F(PlanTest, BadThreadCountsAreRefused) {
  for (const char* text : {"0", "-1", "two", "3x", "99999999999"}) {
    const auto threads = thread_count(0, text, 2);
    EXPECT_EQ(threads.status().code(), StatusCode::kInvalidArgument) << text;
    EXPECT_NE(threads.status().message().find("FOVEA_NUM_THREADS"), std::string::npos) << text;
  }
  EXPECT_EQ(thread_count(-1, nullptr, 2).status().message(),
            "make_plan: options.threads is -1, must be in 0..1024");
  EXPECT_FALSE(thread_count(kMaxThreads + 1, nullptr, 2).ok());
}

TEST_F(PlanTest, MultiprocessorsComeFromTheVariableThenTheGpu) {
  EXPECT_EQ(*sm_count(nullptr, 132), 132);
  EXPECT_EQ(*sm_count("", 132), 132);
  EXPECT_EQ(*sm_count("16", 132), 16);
  EXPECT_EQ(sm_count("133", 132).status().message(),
            "make_plan: FOVEA_SM_COUNT is \"133\", must be in 1..132");
  EXPECT_FALSE(sm_count("0", 132).ok());
}

TEST_F(PlanTest, BadDevicesAreRefused) {
  EXPECT_EQ(make_plan(problem_, {static_cast<DeviceType>(7), 0}).status().message(),
            "make_plan: device is device type 7, must be cpu or cuda");
  EXPECT_EQ(make_plan(problem_, Device::cuda(-1)).status().message(),
            "make_plan: device.index is -1, must be at least 0");
}

TEST_F(PlanTest, CacheFindsByEverythingThatMadeThePlan) {
  PlanCache cache;
  const auto plan = build_plan(problem_, machine_, "wide", table_);
  cache.insert(*plan);
  EXPECT_EQ(cache.find(problem_, machine_, "wide"), *plan);
  EXPECT_EQ(cache.find(problem_, machine_, ""), nullptr);
  DeviceInfo other = machine_;
  other.threads = 4;
  EXPECT_EQ(cache.find(problem_, other, "wide"), nullptr);
  other = machine_;
  other.isa = "another";
  EXPECT_EQ(cache.find(problem_, other, "wide"), nullptr);
  AttentionProblem changed = problem_;
  changed.scale = 1.0;
  EXPECT_EQ(cache.find(changed, machine_, "wide"), nullptr);
}

TEST_F(PlanTest, CacheForgetsTheOldest) {
  PlanCache cache;
  for (size_t n = 0; n <= PlanCache::kEntries; ++n) {
    problem_.batch = static_cast<int64_t>(n);
    cache.insert(*build_plan(problem_, machine_, "", table_));
  }
  EXPECT_NE(cache.find(problem_, machine_, ""), nullptr);
  problem_.batch = 0;
  EXPECT_EQ(cache.find(problem_, machine_, ""), nullptr);
  problem_.batch = 1;
  EXPECT_NE(cache.find(problem_, machine_, ""), nullptr);
}

TEST_F(PlanTest, ManyThreadsMayPlanAtOnce) {
  std::atomic<int> made = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      AttentionProblem p = problem_;
      for (int64_t n = 0; n < 200; ++n) {
        p.batch = (n * (t + 1)) % 50;
        const auto plan = make_plan(p, Device::cpu(), {.backend = "reference", .threads = 1});
        if (plan.ok() && plan->problem() == p) ++made;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(made, 800);
}

}  // namespace
}  // namespace fovea
