// The engines a test runs on: every backend, and for the CPU engine every instruction set that this
// machine has. A test asks for one by name and fails where the plan chose another.
//
//   TEST_P(EveryEngine, OneKeyGivesItsValue) { run(GetParam(), must_parse("q=3 kv=1 d=64")); }
#pragma once

#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "fovea/plan.h"
#include "harness/case.h"
#include "harness/tensors.h"

namespace fovea::test {

struct Engine {
  std::string backend;  // "reference", "cpu"
  std::string isa;      // "avx2"; empty where the backend knows none
};
std::ostream& operator<<(std::ostream& out, const Engine& engine);

std::vector<Engine> every_engine();
std::vector<Engine> cpu_engines();  // without the reference

// A plan of that engine and no other; a test that cannot have it fails here.
Plan plan_on(const Engine& engine, const AttentionProblem& problem, int threads = 2);

harness::Case must_parse(const std::string& text);

// The command that shows a failure again.
std::string reproduce(const Engine& engine, const harness::Case& c);

// Forward, and backward where the case asks, from poisoned outputs and workspace. Calls of a good
// request must succeed and leave canaries and inputs alone.
void run(const Engine& engine, const harness::Case& c, harness::CaseTensors& tensors,
         int threads = 2);

// Runs the case on every engine and holds each output to the oracle under the 2x rule. The oracle,
// which is what such a test spends its time on, is asked once for all engines.
void expect_accurate(const std::vector<Engine>& engines, const harness::Case& c);
void expect_accurate(const std::vector<Engine>& engines, const std::string& text);

class EveryEngine : public testing::TestWithParam<Engine> {};
class CpuEngine : public testing::TestWithParam<Engine> {};

std::string engine_name(const testing::TestParamInfo<Engine>& info);

}  // namespace fovea::test
