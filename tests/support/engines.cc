// The engines a test runs on.
#include "support/engines.h"

#include <cmath>
#include <cstdlib>

#include "backend/backend.h"
#include "backend/cpu/isa.h"
#include "harness/comparison.h"

namespace fovea::test {
namespace {

// Sets FOVEA_ISA for as long as it lives.
class IsaScope {
 public:
  explicit IsaScope(const std::string& isa) {
    const char* before = std::getenv(kName);
    had_ = before != nullptr;
    if (had_) before_ = before;
    if (!isa.empty()) setenv(kName, isa.c_str(), 1);
  }
  ~IsaScope() {
    if (had_) {
      setenv(kName, before_.c_str(), 1);
    } else {
      unsetenv(kName);
    }
  }
  IsaScope(const IsaScope&) = delete;
  IsaScope& operator=(const IsaScope&) = delete;

 private:
  static constexpr const char* kName = "FOVEA_ISA";
  bool had_ = false;
  std::string before_;
};

}  // namespace

std::ostream& operator<<(std::ostream& out, const Engine& engine) {
  return out << engine.backend << (engine.isa.empty() ? "" : "/") << engine.isa;
}

std::vector<Engine> cpu_engines() {
  std::vector<Engine> engines;
  const AttentionProblem any = must_parse("q=1 d=64").problem;
  for (const std::string& isa : cpu_isas()) {
    const DeviceInfo device{Device::cpu(), 1, isa};
    if (cpu_backend().refusals(any, device).empty()) engines.push_back({"cpu", isa});
  }
  return engines;
}

std::vector<Engine> every_engine() {
  std::vector<Engine> engines = cpu_engines();
  engines.insert(engines.begin(), {"reference", ""});
  return engines;
}

Plan plan_on(const Engine& engine, const AttentionProblem& problem, int threads) {
  const IsaScope scope(engine.isa);
  Result<Plan> plan =
      make_plan(problem, Device::cpu(), {.backend = engine.backend, .threads = threads});
  if (!plan.ok()) {
    ADD_FAILURE() << plan.status().message();
    std::abort();  // a test has nothing to run
  }
  EXPECT_EQ(plan->backend(), engine.backend) << plan->explain();
  EXPECT_EQ(plan->kernel().rfind(engine.backend + "/", 0), 0u) << plan->kernel();
  return *plan;
}

harness::Case must_parse(const std::string& text) {
  Result<harness::Case> c = harness::parse_case(text);
  if (!c.ok()) {
    ADD_FAILURE() << c.status().message();
    std::abort();
  }
  return *c;
}

std::string reproduce(const Engine& engine, const harness::Case& c) {
  const std::string isa = engine.isa.empty() ? "" : "FOVEA_ISA=" + engine.isa + " ";
  return "\n  see it again: " + isa + "fovea check --backend " + engine.backend + " --case \"" +
         harness::format_case(c) + "\"\n";
}

void run(const Engine& engine, const harness::Case& c, harness::CaseTensors& tensors, int threads) {
  const Plan plan = plan_on(engine, c.problem, threads);
  tensors.poison_outputs();
  harness::OwnedWorkspace forward_space(plan.workspace_bytes(Pass::kForward));
  const Status forward = plan.forward(tensors.forward(), forward_space.view());
  ASSERT_TRUE(forward.ok()) << forward.message() << reproduce(engine, c);
  EXPECT_TRUE(forward_space.canaries_intact()) << reproduce(engine, c);
  if (c.backward) {
    harness::OwnedWorkspace backward_space(plan.workspace_bytes(Pass::kBackward));
    const Status backward = plan.backward(tensors.backward(), backward_space.view());
    ASSERT_TRUE(backward.ok()) << backward.message() << reproduce(engine, c);
    EXPECT_TRUE(backward_space.canaries_intact()) << reproduce(engine, c);
  }
  EXPECT_TRUE(tensors.canaries_intact()) << reproduce(engine, c);
  EXPECT_TRUE(tensors.inputs_unchanged()) << reproduce(engine, c);
}

void expect_accurate(const std::vector<Engine>& engines, const harness::Case& c) {
  harness::CaseTensors tensors(c);
  harness::Comparison comparison(c, tensors);
  for (const Engine& engine : engines) {
    run(engine, c, tensors);
    if (testing::Test::HasFatalFailure()) return;
    std::vector<harness::Accuracy> found;
    if (c.forward) found = comparison.forward();
    if (c.backward) {
      for (const harness::Accuracy& a : comparison.backward()) found.push_back(a);
    }
    for (const harness::Accuracy& a : found) {
      EXPECT_TRUE(a.ok) << a.tensor << ": error " << a.max_err << ", bound " << a.bound << "; rms "
                        << a.rms << ", bound " << a.rms_bound << reproduce(engine, c);
    }
  }
}

void expect_accurate(const std::vector<Engine>& engines, const std::string& text) {
  expect_accurate(engines, must_parse(text));
}

std::string engine_name(const testing::TestParamInfo<Engine>& info) {
  std::string name = info.param.backend + (info.param.isa.empty() ? "" : "_" + info.param.isa);
  for (char& letter : name) {
    if (letter == '-') letter = '_';
  }
  return name;
}

}  // namespace fovea::test
