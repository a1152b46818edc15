// The oracle itself: its gradients against central differences of its forward pass in float64, for
// every input that has one, and for every feature.
#include <cmath>

#include "support/engines.h"
#include "support/values.h"

namespace fovea::test {
namespace {

using harness::Case;
using harness::CaseTensors;

const Engine kReference{"reference", ""};

// sum of out * dout + lse * dlse: the scalar whose gradient backward computes.
double loss(const Plan& plan, const CaseTensors& tensors) {
  harness::OwnedWorkspace workspace(plan.workspace_bytes(Pass::kForward));
  const Status done = plan.forward(tensors.forward(), workspace.view());
  EXPECT_TRUE(done.ok()) << done.message();
  const auto dot = [](const TensorView& a, const TensorView& b) {
    const std::vector<double> x = values_of(a), y = values_of(b);
    double sum = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      if (std::isfinite(x[i])) sum += x[i] * y[i];  // lse of an empty row is -inf, and constant
    }
    return sum;
  };
  double sum = dot(tensors.forward().out, tensors.backward().dout);
  if (tensors.backward().dlse.given()) sum += dot(tensors.forward().lse, tensors.backward().dlse);
  return sum;
}

void expect_gradient(const Plan& plan, const CaseTensors& tensors, const TensorView& input,
                     const TensorView& gradient, const std::string& what) {
  constexpr double kStep = 1e-5;
  std::array<int64_t, 4> n{1, 1, 1, 1};
  for (int i = 0; i < input.rank; ++i)
    n[static_cast<size_t>(i)] = input.sizes[static_cast<size_t>(i)];
  for (int64_t a = 0; a < n[0]; ++a)
    for (int64_t b = 0; b < n[1]; ++b)
      for (int64_t c = 0; c < n[2]; ++c)
        for (int64_t d = 0; d < n[3]; ++d) {
          const double before = harness::read_element(input, a, b, c, d);
          harness::write_element(input, before + kStep, a, b, c, d);
          const double above = loss(plan, tensors);
          harness::write_element(input, before - kStep, a, b, c, d);
          const double below = loss(plan, tensors);
          harness::write_element(input, before, a, b, c, d);
          const double slope = (above - below) / (2 * kStep);
          EXPECT_NEAR(harness::read_element(gradient, a, b, c, d), slope, 1e-7)
              << what << " at " << a << " " << b << " " << c << " " << d;
        }
}

class OracleGradient : public testing::TestWithParam<const char*> {};

TEST_P(OracleGradient, IsTheSlopeOfTheForwardPass) {
  const Case c = must_parse(std::string(GetParam()) + " dtype=f64 pass=fwd,bwd");
  CaseTensors tensors(c);
  run(kReference, c, tensors);
  const Plan plan = plan_on(kReference, c.problem);
  const BackwardTensors& t = tensors.backward();
  expect_gradient(plan, tensors, t.q, t.dq, "dq");
  expect_gradient(plan, tensors, t.k, t.dk, "dk");
  expect_gradient(plan, tensors, t.v, t.dv, "dv");
  if (t.dbias.given()) expect_gradient(plan, tensors, t.bias, t.dbias, "dbias");
  if (t.dsink.given()) expect_gradient(plan, tensors, t.sink, t.dsink, "dsink");
}

INSTANTIATE_TEST_SUITE_P(
    Features, OracleGradient,
    testing::Values(
        "b=2 hq=4 hkv=2 q=3 kv=5 d=4 dv=3", "b=1 hq=2 q=5 kv=3 d=4 mask=causal",
        "b=2 hq=2 hkv=1 q=4 kv=6 d=5 mask=window:1:1 prefix=2",
        "b=2 hq=4 hkv=2 q=3 kv=4 d=4 bias=full dbias", "b=2 hq=4 hkv=2 q=3 kv=4 d=4 bias=bhq dbias",
        "b=2 hq=2 q=3 kv=4 d=4 bias=q dbias softcap=2", "b=2 hq=2 q=3 kv=4 d=4 bias=b dbias sink",
        "b=1 hq=2 q=20 kv=4 d=2 bias=bh dbias mask=causal dlse",
        "b=2 hq=2 q=4 kv=5 d=4 boolmask dlse", "b=3 hq=2 q=4 kv=5 d=4 keylens=5,0,2 dlse sink",
        "b=3 hq=2 q=4 kv=5 d=4 varlen q_lens=4,0,2 kv_lens=3,5,0 mask=causal bias dbias sink",
        "b=2 hq=2 q=3 kv=4 d=4 alibi=batch softcap=1.5 scale=0.7",
        "b=1 hq=2 q=6 kv=6 d=4 dropout=0.4 sink dlse",
        "b=2 hq=4 hkv=2 q=3 kv=6 d=4 dv=2 dropout=0.3 softcap=3 sink dlse bias=b dbias alibi "
        "boolmask=b mask=window:3:1"));

}  // namespace
}  // namespace fovea::test
