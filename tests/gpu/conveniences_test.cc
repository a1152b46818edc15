// The one-call conveniences on a GPU: the bits of the plan they stand for, and what they say when
// there is no memory for the workspace.
#include "harness/calls.h"
#include "harness/device_tensors.h"
#include "stream.h"
#include "support/engines.h"
#include "support/values.h"

namespace fovea::test::conveniences {
namespace {

using harness::Case;
using harness::CaseTensors;
using harness::DeviceTensors;

class Conveniences : public EngineTest {
 protected:
  const Device device_ = Device::cuda(0);
};

void expect_ok(const Status& s) { ASSERT_TRUE(s.ok()) << s.message(); }

void expect_same_bits(const CaseTensors& a, const CaseTensors& b, const std::string& why) {
  for (const auto& [x, y] :
       {std::pair(a.forward().out, b.forward().out), std::pair(a.forward().lse, b.forward().lse),
        std::pair(a.backward().dq, b.backward().dq), std::pair(a.backward().dk, b.backward().dk),
        std::pair(a.backward().dv, b.backward().dv),
        std::pair(a.backward().dsink, b.backward().dsink)}) {
    if (!x.given()) continue;
    EXPECT_EQ(bits_of(x), bits_of(y)) << why;
  }
}

TEST_F(Conveniences, GiveThePlansBits) {
  size_t forward_bytes = 0, backward_bytes = 0;
  for (const char* dtype : {"bf16", "f16", "f32"}) {
    for (const char* shape :
         {"b=2 hq=8 hkv=1 q=1 kv=4000 d=64 sink",  // keys in parts, which need a workspace
          "b=2 hq=4 hkv=2 q=130 kv=200 d=128 mask=causal",
          "b=3 hq=2 q=90 kv=90 d=80 varlen q_lens=90,0,17 kv_lens=64,5,90"}) {
      const Case c = must_parse(std::string(shape) + " deterministic pass=fwd,bwd dtype=" + dtype);
      const std::string why = harness::format_case(c);
      const Result<Plan> plan = make_plan(c.problem, device_);
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      forward_bytes += plan->workspace_bytes(Pass::kForward);
      backward_bytes += plan->workspace_bytes(Pass::kBackward);
      CaseTensors expected(c), found(c);
      harness::Calls calls(*plan, expected, device_);
      expect_ok(calls.forward());
      expect_ok(calls.backward());
      DeviceTensors there(found, device_.index);
      const OwnedStream own;
      for (const cudaStream_t stream : {cudaStream_t{nullptr}, own.get()}) {
        found.poison_outputs();
        expect_ok(there.upload());
        expect_ok(attention_forward(c.problem, there.forward(), {stream}));
        expect_ok(attention_backward(c.problem, there.backward(), {stream}));
        expect_ok(there.download());
        expect_same_bits(found, expected, why);
        EXPECT_TRUE(found.canaries_intact()) << why;
        EXPECT_TRUE(found.inputs_unchanged()) << why;
      }
    }
  }
  EXPECT_GT(forward_bytes, 0u) << "no case had a workspace to allocate";
  EXPECT_GT(backward_bytes, 0u) << "no case had a workspace to allocate";
}

// More rows than any GPU has memory for: their statistics alone are terabytes. The workspace comes
// before the tensors are looked at, so there need be none.
TEST_F(Conveniences, NameTheWorkspaceThatCannotBeHad) {
  Case c = must_parse("b=1024 hq=1024 q=1048576 kv=1 d=16 dtype=bf16");
  const Result<Plan> plan = make_plan(c.problem, device_);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  const size_t bytes = plan->workspace_bytes(Pass::kBackward);
  size_t free = 0, total = 0;
  ASSERT_CUDA(cudaMemGetInfo(&free, &total));
  if (bytes <= total) GTEST_SKIP() << "the workspace of " << bytes << " bytes might fit";
  BackwardTensors tensors;
  tensors.q.device = device_;
  const Status refused = attention_backward(c.problem, tensors);
  EXPECT_EQ(refused.code(), StatusCode::kOutOfMemory);
  EXPECT_EQ(refused.message(), "attention_backward: a workspace of " + std::to_string(bytes) +
                                   " bytes could not be allocated on cuda:0");
  // The failure was told once and is not told again.
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace
}  // namespace fovea::test::conveniences
