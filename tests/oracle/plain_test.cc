// The reference engine in plain arithmetic gives, element for element, what the oracle's samples
// say of the plain formula: the yardstick of whole layers is that of the operator.
#include "backend/reference/oracle.h"
#include "support/engines.h"

namespace fovea::test {
namespace {

using harness::Case;
using harness::CaseTensors;
using harness::OwnedWorkspace;
using harness::read_element;

// Of one head, [row, channel].
void expect_rows(const TensorView& found, const std::vector<double>& expected, int64_t b, int64_t h,
                 int64_t dim, const std::string& why) {
  for (size_t n = 0; n < expected.size(); ++n) {
    const auto at = static_cast<int64_t>(n);
    ASSERT_EQ(read_element(found, b, at / dim, h, at % dim), expected[n]) << "element " << n << why;
  }
}

TEST(PlainReference, IsTheOraclesPlainFormula) {
  for (const char* dtype : {"f32", "f32 tf32", "bf16", "f16"}) {
    for (const char* rest : {"mask=causal", "alibi dropout=0.2", "boolmask=bh softcap=5"}) {
      const Case c = must_parse("b=2 hq=3 hkv=3 q=9 kv=13 d=8 dv=5 pass=fwd,bwd " +
                                std::string(rest) + " dtype=" + dtype);
      const std::string why = " of " + harness::format_case(c);
      const AttentionProblem& p = c.problem;
      const auto plan =
          make_plan(p, Device::cpu(), {.backend = "reference", .arithmetic = Arithmetic::kPlain});
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      EXPECT_EQ(plan->kernel(), "reference/plain");
      CaseTensors tensors(c);
      const OwnedWorkspace forward(plan->workspace_bytes(Pass::kForward));
      const OwnedWorkspace backward(plan->workspace_bytes(Pass::kBackward));
      ASSERT_TRUE(plan->forward(tensors.forward(), forward.view()).ok());
      ASSERT_TRUE(plan->backward(tensors.backward(), backward.view()).ok());
      for (int64_t b = 0; b < p.batch; ++b) {
        for (int64_t h = 0; h < p.head_q; ++h) {
          reference::GroupSample group{.b = b, .head_kv = h, .rows = {}, .keys = {}};
          for (int64_t i = 0; i < p.q_len; ++i) group.rows.push_back({h, i});
          for (int64_t j = 0; j < p.kv_len; ++j) group.keys.push_back(j);
          const auto ahead =
              reference::sample_forward(Arithmetic::kPlain, p, tensors.forward(), group);
          const auto back = reference::sample_backward(Arithmetic::kPlain, p, tensors.backward(),
                                                       group, reference::StatsFrom::kGiven);
          expect_rows(tensors.forward().out, ahead.out, b, h, p.dim_v, why);
          expect_rows(tensors.backward().dq, back.dq, b, h, p.dim_qk, why);
          expect_rows(tensors.backward().dk, back.dk, b, h, p.dim_qk, why);
          expect_rows(tensors.backward().dv, back.dv, b, h, p.dim_v, why);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

}  // namespace
}  // namespace fovea::test
