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

const char* const kDTypes[] = {"f32", "bf16", "f16"};

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

// The canaries themselves: a byte past an output is seen.
TEST(Canaries, SeeAWriteOutside) {
  const Case c = must_parse("hq=2 q=3 kv=3 d=5 pad=2 order=bshd");
  CaseTensors t(c);
  EXPECT_TRUE(t.canaries_intact());
  auto* out = static_cast<float*>(t.forward().out.data);
  const float kept = out[5];
  out[5] = 1;  // the padding after the first row
  EXPECT_FALSE(t.canaries_intact());
  out[5] = kept;
  EXPECT_TRUE(t.canaries_intact());
  const float before = out[-1];
  out[-1] = 0;
  EXPECT_FALSE(t.canaries_intact());
  out[-1] = before;
  static_cast<float*>(t.forward().q.data)[0] += 1;
  EXPECT_FALSE(t.inputs_unchanged());
  harness::OwnedWorkspace workspace(100);
  static_cast<char*>(workspace.view().data)[100] = 0;
  EXPECT_FALSE(workspace.canaries_intact());
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
    const Plan plan = plan_on(GetParam(), c.problem);
    std::vector<uint64_t> dq;
    for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
      harness::OwnedWorkspace workspace(plan.workspace_bytes(pass) + 4096);
      auto* bytes = static_cast<unsigned char*>(workspace.view().data);
      std::fill_n(bytes, workspace.view().bytes, static_cast<unsigned char>(0));
      const Status s = pass == Pass::kForward ? plan.forward(zeroed.forward(), workspace.view())
                                              : plan.backward(zeroed.backward(), workspace.view());
      ASSERT_TRUE(s.ok()) << s.message();
    }
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
        harness::OwnedWorkspace forward_space(plan.workspace_bytes(Pass::kForward));
        harness::OwnedWorkspace backward_space(plan.workspace_bytes(Pass::kBackward));
        CaseTensors& t = *tensors[n];
        for (int time = 0; time < kTimes; ++time) {
          t.poison_outputs();
          const Status f = plan.forward(t.forward(), forward_space.view());
          const Status b = plan.backward(t.backward(), backward_space.view());
          if (!f.ok() || !b.ok()) faults[n] = f.message() + b.message();
          if (!forward_space.canaries_intact() || !backward_space.canaries_intact()) {
            faults[n] = "wrote past its workspace";
          }
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
