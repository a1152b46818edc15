// What a call must survive and must not do: memory around and under it, threads beside it.
#include <cmath>
#include <thread>

#include "support/engines.h"
#include "support/values.h"

namespace fovea::test {
namespace {

using harness::Case;
using harness::CaseTensors;

class Robust : public EveryEngine {};

const char* const kDTypes[] = {"bf16", "f16", "f32"};

// 13: canaries around outputs, between padded rows and around the workspace stay, and so do inputs.
// run() asserts all of it; here it meets shapes whose last tiles are cut.
TEST_P(Robust, NothingIsWrittenOutside) {
  for (const char* dtype : kDTypes) {
    for (const char* shape : {"q=1 kv=1 d=1", "q=17 kv=33 d=7 dv=9", "q=65 kv=129 d=33 dv=1",
                              "q=127 kv=3 d=64", "q=5 kv=200 d=72 dv=40"}) {
      for (const char* extra : {"order=bshd pad=1", "pad=7 varlen", "order=bhsd keylens sink",
                                "bias=h dbias mask=causal pad=2 deterministic"}) {
        const Case c = must_parse("b=2 hq=4 hkv=2 pass=fwd,bwd " + std::string(shape) + " " +
                                  extra + " dtype=" + dtype);
        CaseTensors t(c);
        run(GetParam(), c, t);
        for (const double x : values_of(t.forward().out)) {
          ASSERT_FALSE(std::isnan(x)) << "not written" << reproduce(GetParam(), c);
        }
        const BackwardTensors& b = t.backward();
        for (const TensorView& view : {b.dq, b.dk, b.dv}) {
          for (const double x : values_of(view)) {
            ASSERT_FALSE(std::isnan(x)) << "not written" << reproduce(GetParam(), c);
          }
        }
      }
    }
  }
}

// What the workspace held before, and how much larger than asked it is, changes no bit.
TEST_P(Robust, WorkspaceContentsDoNotMatter) {
  for (const char* dtype : kDTypes) {
    const Case c = must_parse(
        "b=2 hq=4 hkv=2 q=40 kv=300 d=32 mask=causal deterministic "
        "pass=fwd,bwd bias=b dbias sink dtype=" +
        std::string(dtype));
    CaseTensors poisoned(c), zeroed(c);
    run(GetParam(), c, poisoned);
    harness::Calls calls =
        calls_on(GetParam(), plan_on(GetParam(), c.problem), zeroed, {.byte = 0, .extra = 4096});
    for (const Status& s : {calls.forward(), calls.backward()}) ASSERT_TRUE(s.ok()) << s.message();
    const std::string why = reproduce(GetParam(), c);
    EXPECT_EQ(bits_of(poisoned.forward().out), bits_of(zeroed.forward().out)) << why;
    EXPECT_EQ(bits_of(poisoned.backward().dq), bits_of(zeroed.backward().dq)) << why;
    EXPECT_EQ(bits_of(poisoned.backward().dk), bits_of(zeroed.backward().dk)) << why;
    EXPECT_EQ(bits_of(poisoned.backward().dbias), bits_of(zeroed.backward().dbias)) << why;
    EXPECT_EQ(bits_of(poisoned.backward().dsink), bits_of(zeroed.backward().dsink)) << why;
  }
}

// One plan, many threads, a workspace each: the bits of a lone call.
TEST_P(Robust, OnePlanServesManyThreads) {
  for (const char* dtype : kDTypes) {
    const Case c = must_parse(
        "b=2 hq=4 hkv=2 q=33 kv=150 d=32 mask=causal deterministic "
        "pass=fwd,bwd dtype=" +
        std::string(dtype));
    CaseTensors alone(c);
    run(GetParam(), c, alone);
    const Plan plan = plan_on(GetParam(), c.problem);
    constexpr int kThreads = 4, kTimes = 10;
    std::vector<std::unique_ptr<CaseTensors>> tensors;
    for (int n = 0; n < kThreads; ++n) tensors.push_back(std::make_unique<CaseTensors>(c));
    std::vector<std::string> faults(kThreads);
    std::vector<std::thread> threads;
    for (size_t n = 0; n < kThreads; ++n) {
      threads.emplace_back([&, n] {
        harness::Calls calls = calls_on(GetParam(), plan, *tensors[n]);
        for (int time = 0; time < kTimes; ++time) {
          tensors[n]->poison_outputs();
          const Status f = calls.forward(), b = calls.backward();
          if (!f.ok() || !b.ok()) faults[n] = f.message() + b.message();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (size_t n = 0; n < kThreads; ++n) {
      const std::string why = faults[n] + reproduce(GetParam(), c);
      EXPECT_EQ(faults[n], "");
      EXPECT_EQ(bits_of(tensors[n]->forward().out), bits_of(alone.forward().out)) << why;
      EXPECT_EQ(bits_of(tensors[n]->forward().lse), bits_of(alone.forward().lse)) << why;
      EXPECT_EQ(bits_of(tensors[n]->backward().dq), bits_of(alone.backward().dq)) << why;
      EXPECT_EQ(bits_of(tensors[n]->backward().dk), bits_of(alone.backward().dk)) << why;
      EXPECT_EQ(bits_of(tensors[n]->backward().dv), bits_of(alone.backward().dv)) << why;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, Robust, testing::ValuesIn(every_engine()), engine_name);

}  // namespace
}  // namespace fovea::test
