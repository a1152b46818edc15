// The engines a test runs on.
#include "support/engines.h"

#include <cmath>
#include <cstdlib>

#include "backend/cuda/device.h"
#include "base/refusal.h"
#include "harness/comparison.h"
#include "support/variable_scope.h"

namespace fovea::test {
namespace {

constexpr const char* kIsa = "FOVEA_ISA";
constexpr const char* kSmCount = "FOVEA_SM_COUNT";

int64_t skipped_problems = 0;

bool any_backend(const Engine& engine) { return engine.backend == "best"; }

bool on_gpu(const Engine& engine) { return engine.device.type == DeviceType::kCuda; }

Result<Plan> ask_plan(const Engine& engine, const AttentionProblem& problem, int threads) {
  const VariableScope isa(kIsa, engine.isa), sms(kSmCount, engine.sms);
  const std::string backend = any_backend(engine) ? "" : engine.backend;
  return make_plan(problem, engine.device, {.backend = backend, .threads = threads});
}

bool may_skip(const Engine& engine, const Status& refused) {
  const char* wish = std::getenv("FOVEA_GPU_ALLOW_UNSUPPORTED");
  return on_gpu(engine) && refused.code() == StatusCode::kUnsupported && wish != nullptr &&
         std::string(wish) == "1";
}

// GoogleTest takes this exception for one whose failure, or skip, has been told already.
[[noreturn]] void end_test(testing::TestPartResult::Type type, const std::string& message) {
  throw testing::AssertionException(
      testing::TestPartResult(type, __FILE__, __LINE__, message.c_str()));
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const Engine& engine) {
  out << engine.backend << (engine.isa.empty() ? "" : "/") << engine.isa;
  return engine.sms.empty() ? out : out << "/" << engine.sms << "sm";
}

Plan plan_on(const Engine& engine, const AttentionProblem& problem, int threads) {
  Result<Plan> plan = ask_plan(engine, problem, threads);
  if (!plan.ok()) {
    skip_if_allowed(engine, plan.status());
    ADD_FAILURE() << plan.status().message();
    end_test(testing::TestPartResult::kFatalFailure, plan.status().message());
  }
  if (!any_backend(engine)) {
    EXPECT_EQ(plan->backend(), engine.backend) << plan->explain();
  }
  EXPECT_EQ(plan->kernel().rfind(plan->backend() + "/", 0), 0u) << plan->kernel();
  return *plan;
}

void skip_if_allowed(const Engine& engine, const Status& refused) {
  if (!may_skip(engine, refused)) return;
  ++skipped_problems;
  [&] { GTEST_SKIP() << refused.message(); }();
  end_test(testing::TestPartResult::kSkip, refused.message());
}

int64_t unsupported_count() { return skipped_problems; }

harness::Case must_parse(const std::string& text) {
  Result<harness::Case> c = harness::parse_case(text);
  if (!c.ok()) {
    ADD_FAILURE() << c.status().message();
    std::abort();
  }
  return *c;
}

std::string reproduce(const Engine& engine, const harness::Case& c) {
  const auto setting = [](const std::string& name, const std::string& value) {
    return value.empty() ? "" : name + "=" + value + " ";
  };
  const std::string settings = setting(kIsa, engine.isa) + setting(kSmCount, engine.sms);
  const std::string device = on_gpu(engine) ? " --device " + show(engine.device) : "";
  const std::string backend = any_backend(engine) ? "" : " --backend " + engine.backend;
  return "\n  see it again: " + settings + "fovea check" + backend + device + " --case \"" +
         harness::format_case(c) + "\"\n";
}

harness::Calls calls_on(const Engine& engine, const Plan& plan, harness::CaseTensors& tensors,
                        harness::Scratch scratch) {
  return harness::Calls(plan, tensors, engine.device, scratch);
}

namespace {

// `refused` is the backward pass's status where that may be passed over.
void run_passes(const Engine& engine, const harness::Case& c, harness::CaseTensors& tensors,
                int threads, Status& refused) {
  harness::Calls calls = calls_on(engine, plan_on(engine, c.problem, threads), tensors);
  tensors.poison_outputs();
  const Status forward = calls.forward();
  ASSERT_TRUE(forward.ok()) << forward.message() << reproduce(engine, c);
  if (c.backward) {
    const Status backward = calls.backward();
    if (may_skip(engine, backward)) {
      refused = backward;
    } else {
      ASSERT_TRUE(backward.ok()) << backward.message() << reproduce(engine, c);
    }
  }
  EXPECT_TRUE(tensors.canaries_intact()) << reproduce(engine, c);
  EXPECT_TRUE(tensors.inputs_unchanged()) << reproduce(engine, c);
}

}  // namespace

void run(const Engine& engine, const harness::Case& c, harness::CaseTensors& tensors, int threads) {
  Status refused;
  run_passes(engine, c, tensors, threads, refused);
  skip_if_allowed(engine, refused);
}

void expect_accurate(const std::vector<Engine>& engines, const harness::Case& c,
                     double cost_limit) {
  harness::CaseTensors tensors(c);
  harness::Comparison comparison(c, tensors, cost_limit);
  for (const Engine& engine : engines) {
    // A refused case is passed over here, so that the test's other cases still run.
    if (const Result<Plan> plan = ask_plan(engine, c.problem, 2);
        !plan.ok() && may_skip(engine, plan.status())) {
      ++skipped_problems;
      continue;
    }
    Status refused;
    run_passes(engine, c, tensors, 2, refused);
    if (testing::Test::HasFatalFailure()) return;
    if (!refused.ok()) ++skipped_problems;
    std::vector<harness::Accuracy> found;
    if (c.forward) found = comparison.forward();
    if (c.backward && refused.ok()) {
      for (const harness::Accuracy& a : comparison.backward()) found.push_back(a);
    }
    for (const harness::Accuracy& a : found) {
      EXPECT_TRUE(a.ok) << a.tensor << ": error " << a.max_err << ", bound " << a.bound << "; rms "
                        << a.rms << ", bound " << a.rms_bound << reproduce(engine, c);
    }
  }
}

void expect_accurate(const std::vector<Engine>& engines, const std::string& text,
                     double cost_limit) {
  expect_accurate(engines, must_parse(text), cost_limit);
}

void EngineTest::SetUp() {
  for (const Engine& engine : every_engine()) {
    if (on_gpu(engine) && cuda_device_count() == 0) {
      GTEST_SKIP() << "no CUDA device on this machine for the engine " << engine;
    }
  }
}

std::string engine_name(const testing::TestParamInfo<Engine>& info) {
  std::string name = info.param.backend + (info.param.isa.empty() ? "" : "_" + info.param.isa);
  if (!info.param.sms.empty()) name += "_" + info.param.sms + "sm";
  for (char& letter : name) {
    if (letter == '-') letter = '_';
  }
  return name;
}

}  // namespace fovea::test
