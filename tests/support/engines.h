// The engines a test runs on: every backend, and for the CPU engine every instruction set that this
// machine has; in the program of the gpu rung, the engines of a GPU. A test asks for one by name
// and fails where the plan chose another.
//
//   TEST_P(EveryEngine, OneKeyGivesItsValue) { run(GetParam(), must_parse("q=3 kv=1 d=64")); }
#pragma once

#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "fovea/plan.h"
#include "harness/accuracy.h"
#include "harness/calls.h"
#include "harness/case.h"
#include "harness/tensors.h"

namespace fovea::test {

struct Engine {
  std::string backend;  // "reference", "cpu", "portable"; "best": whichever the plan prefers
  std::string isa;      // "avx2"; empty where the backend knows none
  Device device = Device::cpu();
  std::string sms{};  // multiprocessors that plans count on; empty: the GPU's
};
std::ostream& operator<<(std::ostream& out, const Engine& engine);

// Each program has its own: host_engines.cc for most, gpu/gpu_engines.cc for the gpu rung.
std::vector<Engine> every_engine();
std::vector<Engine> fast_engines();  // without the reference

// A plan of that engine and no other; a test that cannot have it fails and ends here. With
// FOVEA_GPU_ALLOW_UNSUPPORTED=1, a problem that a GPU's engine refuses is skipped instead.
Plan plan_on(const Engine& engine, const AttentionProblem& problem, int threads = 2);

harness::Case must_parse(const std::string& text);

// The command that shows a failure again.
std::string reproduce(const Engine& engine, const harness::Case& c);

// Ends the test as skipped where a GPU's engine refused and that is allowed, as above.
void skip_if_allowed(const Engine& engine, const Status& refused);

// How many problems were skipped that way, so far.
int64_t unsupported_count();

// Calls of an engine's plan on tensors of the host.
harness::Calls calls_on(const Engine& engine, const Plan& plan, harness::CaseTensors& tensors,
                        harness::Scratch scratch = {});

// Forward, and backward where the case asks, from poisoned outputs and workspace. Calls of a good
// request must succeed and leave canaries and inputs alone.
void run(const Engine& engine, const harness::Case& c, harness::CaseTensors& tensors,
         int threads = 2);

// Runs the case on every engine and holds each output to the oracle under the 2x rule. The oracle,
// which is what such a test spends its time on, is asked once for all engines.
void expect_accurate(const std::vector<Engine>& engines, const harness::Case& c,
                     double cost_limit = harness::kDefaultCost);
void expect_accurate(const std::vector<Engine>& engines, const std::string& text,
                     double cost_limit = harness::kDefaultCost);

// Skips where the machine has no device for the engines.
class EngineTest : public testing::Test {
 protected:
  void SetUp() override;
};

class EveryEngine : public EngineTest, public testing::WithParamInterface<Engine> {};
class FastEngine : public EngineTest, public testing::WithParamInterface<Engine> {};

std::string engine_name(const testing::TestParamInfo<Engine>& info);

}  // namespace fovea::test
