// The oracle against results worked out by hand, and its samples against its whole.
#include <cmath>

#include "backend/reference/oracle.h"
#include "base/philox.h"
#include "harness/accuracy.h"
#include "support/engines.h"
#include "support/values.h"

namespace fovea::test::hand {
namespace {

using harness::Case;
using harness::CaseTensors;
using harness::write_element;

const Engine kReference{"reference", ""};
constexpr double kInf = std::numeric_limits<double>::infinity();

// One query and keys of one channel: the score of key j is k[j], its value v[j].
struct Tiny {
  Case c;
  CaseTensors tensors;

  explicit Tiny(const std::string& extra, std::vector<double> k, std::vector<double> v)
      : c(must_parse("q=1 kv=" + std::to_string(k.size()) + " d=1 scale=1 dtype=f64 " + extra)),
        tensors(c) {
    write_element(tensors.forward().q, 1, 0, 0, 0, 0);
    for (size_t j = 0; j < k.size(); ++j) {
      write_element(tensors.forward().k, k[j], 0, static_cast<int64_t>(j), 0, 0);
      write_element(tensors.forward().v, v[j], 0, static_cast<int64_t>(j), 0, 0);
    }
    tensors.accept_inputs();
  }

  void run_both() { run(kReference, c, tensors); }
  double out() const { return harness::read_element(tensors.forward().out, 0); }
  double lse() const { return harness::read_element(tensors.forward().lse, 0); }
};

TEST(OracleByHand, TwoKeys) {
  Tiny t("", {0, std::log(3.0)}, {10, 20});  // weights 1/4 and 3/4
  t.run_both();
  EXPECT_NEAR(t.out(), 17.5, 1e-13);
  EXPECT_NEAR(t.lse(), std::log(4.0), 1e-14);
}

TEST(OracleByHand, SinkJoinsTheDenominatorAlone) {
  Tiny t("sink", {0, 0}, {6, 12});
  write_element(t.tensors.forward().sink, std::log(2.0), 0);
  t.tensors.accept_inputs();
  t.run_both();  // weights 1/4, 1/4, sink 1/2
  EXPECT_NEAR(t.out(), 4.5, 1e-13);
  EXPECT_NEAR(t.lse(), std::log(4.0), 1e-14);
}

TEST(OracleByHand, SoftcapComesBeforeBias) {
  Tiny t("softcap=2 bias", {1, 5}, {0, 1});
  write_element(t.tensors.forward().bias, 0.5, 0, 0, 0, 0);
  write_element(t.tensors.forward().bias, -1.5, 0, 0, 0, 1);
  t.tensors.accept_inputs();
  t.run_both();
  const double s0 = 2 * std::tanh(0.5) + 0.5, s1 = 2 * std::tanh(2.5) - 1.5;
  EXPECT_NEAR(t.out(), std::exp(s1) / (std::exp(s0) + std::exp(s1)), 1e-14);
}

TEST(OracleByHand, PositionsAreAlignedAtTheEnd) {
  // Query i of 2 stands at key i + 1 of 3: row 0 sees keys 0..1, row 1 all.
  const Case c = must_parse("q=2 kv=3 d=1 dtype=f64 mask=causal data=constant");
  CaseTensors tensors(c);
  for (int64_t j = 0; j < 3; ++j) write_element(tensors.forward().v, double(1 << j), 0, j, 0, 0);
  tensors.accept_inputs();
  run(kReference, c, tensors);
  EXPECT_NEAR(harness::read_element(tensors.forward().out, 0, 0), 1.5, 1e-14);
  EXPECT_NEAR(harness::read_element(tensors.forward().out, 0, 1), 7.0 / 3, 1e-14);
}

TEST(OracleByHand, AlibiTakesTheDistanceToThePosition) {
  Tiny t("alibi", {0, 0, 0}, {1, 0, 0});  // the query stands at key 2
  write_element(t.tensors.forward().alibi_slopes, std::log(2.0), 0);
  t.tensors.accept_inputs();
  t.run_both();  // weights 1/4, 1/2, 1 over 7/4
  EXPECT_NEAR(t.out(), 1.0 / 7, 1e-14);
}

TEST(OracleByHand, KeyLengthsStandInForKvLenInPositions) {
  const Case c = must_parse("q=1 kv=4 d=1 dtype=f64 keylens=2 alibi data=constant");
  CaseTensors tensors(c);
  for (int64_t j = 0; j < 4; ++j) write_element(tensors.forward().v, j == 1 ? 1 : 0, 0, j, 0, 0);
  write_element(tensors.forward().alibi_slopes, std::log(2.0), 0);
  tensors.accept_inputs();
  run(kReference, c, tensors);  // position 1: distances 1, 0
  EXPECT_NEAR(harness::read_element(tensors.forward().out, 0), 2.0 / 3, 1e-14);
}

TEST(OracleByHand, PrefixIsSeenByEverybody) {
  // Row 0 of 3 sees itself and the first two keys.
  const Case c = must_parse("q=3 kv=3 d=1 dtype=f64 mask=window:0:0 prefix=2 data=constant");
  CaseTensors tensors(c);
  for (int64_t j = 0; j < 3; ++j) write_element(tensors.forward().v, double(1 << j), 0, j, 0, 0);
  tensors.accept_inputs();
  run(kReference, c, tensors);
  EXPECT_NEAR(harness::read_element(tensors.forward().out, 0, 0), 1.5, 1e-14);
  EXPECT_NEAR(harness::read_element(tensors.forward().out, 0, 1), 1.5, 1e-14);
  EXPECT_NEAR(harness::read_element(tensors.forward().out, 0, 2), 7.0 / 3, 1e-14);
}

TEST(OracleByHand, DropoutKeepsByThePhiloxWord) {
  const double p = 0.5;
  Tiny t("dropout=0.5", {0, 0, 0, 0, 0, 0, 0, 0}, {1, 2, 4, 8, 16, 32, 64, 128});
  t.run_both();
  const DropoutSeed seed = t.tensors.forward().dropout;
  double expected = 0;
  for (int64_t j = 0; j < 8; ++j) {
    const auto block =
        philox4x32({static_cast<uint32_t>(j / 4), 0, 0, static_cast<uint32_t>(seed.offset)},
                   dropout_key(seed.seed, seed.offset));
    if (block[static_cast<size_t>(j % 4)] >= 0x80000000u) expected += double(1 << j) / 8 / (1 - p);
  }
  EXPECT_NEAR(t.out(), expected, 1e-12);
  EXPECT_NEAR(t.lse(), std::log(8.0), 1e-14);  // dropout leaves the softmax alone
}

TEST(OracleByHand, ARowThatSeesNothingIsZeroNotNaN) {
  const Case c = must_parse("q=3 kv=1 d=4 dtype=f64 mask=causal pass=fwd,bwd dlse");
  CaseTensors tensors(c);
  run(kReference, c, tensors);
  for (int64_t i = 0; i < 2; ++i) {  // rows 0 and 1 stand before the only key
    EXPECT_EQ(harness::read_element(tensors.forward().lse, 0, 0, i), -kInf);
    for (int64_t d = 0; d < 4; ++d) {
      EXPECT_EQ(harness::read_element(tensors.forward().out, 0, i, 0, d), 0);
      EXPECT_EQ(harness::read_element(tensors.backward().dq, 0, i, 0, d), 0);
    }
  }
}

TEST(OracleByHand, MinusInfinityBiasHidesTheKey) {
  Tiny t("bias", {0, 0}, {3, std::nan("")});
  write_element(t.tensors.forward().bias, 0, 0, 0, 0, 0);
  write_element(t.tensors.forward().bias, -kInf, 0, 0, 0, 1);
  t.tensors.accept_inputs();
  t.run_both();
  EXPECT_EQ(t.out(), 3);
}

// exp(-2000) is too small for a double.
TEST(OracleByHand, NoWeightIsSoSmallThatInfinityWouldNotShow) {
  for (const double bad : {kInf, -kInf, std::nan("")}) {
    Tiny t("", {0, -2000, 0}, {3, bad, 5});
    t.run_both();
    EXPECT_EQ(std::isnan(t.out()), std::isnan(bad));
    if (!std::isnan(bad)) EXPECT_EQ(t.out(), bad);
    EXPECT_NEAR(t.lse(), std::log(2.0), 1e-14);
  }
}

// The sampled oracle that other engines are held to is the same function as the engine above.
TEST(OracleSamples, AgreeWithTheWhole) {
  for (const char* text :
       {"b=2 hq=4 hkv=2 q=9 kv=13 d=8 dv=6 mask=causal sink dlse bias=b dbias softcap=4",
        "b=3 hq=2 hkv=1 q=9 kv=13 d=8 varlen mask=window:3:2 prefix=1 dropout=0.2 alibi",
        "b=2 hq=2 q=7 kv=5 d=8 keylens boolmask=h mask=causal dlse"}) {
    const Case c = must_parse(std::string(text) + " dtype=f64 pass=fwd,bwd");
    CaseTensors tensors(c);
    run(kReference, c, tensors);
    for (const auto& a : harness::compare_with_oracle(c, tensors, true, true)) {
      EXPECT_TRUE(a.ok) << a.tensor << reproduce(kReference, c);
      EXPECT_LT(a.max_err, 1e-12) << a.tensor << reproduce(kReference, c);
    }
    // With almost no budget it looks at few rows and keys, from the outputs given; still the same.
    for (const auto& a : harness::compare_with_oracle(c, tensors, true, true, 100)) {
      EXPECT_LT(a.max_err, 1e-12) << a.tensor << reproduce(kReference, c);
    }
  }
}

// The rule must be able to fail: one element off by a little more than rounding is found.
TEST(TwoTimesRule, FindsASmallError) {
  for (const char* dtype : {"f32", "bf16", "f16"}) {
    const Case c = must_parse("hq=2 q=64 kv=64 d=32 pass=fwd,bwd dtype=" + std::string(dtype));
    CaseTensors tensors(c);
    run(kReference, c, tensors);
    for (const auto& a : harness::compare_with_oracle(c, tensors, true, true)) {
      EXPECT_TRUE(a.ok) << a.tensor << " " << a.max_err << " " << a.bound
                        << reproduce(kReference, c);
    }
    const double error = c.problem.dtype == DType::kF32 ? 1e-4 : 0.1;
    const BackwardTensors& t = tensors.backward();
    for (const TensorView& view : {t.out, t.dq, t.dk, t.dv}) {
      const double before = harness::read_element(view, 0, 33, 1, 7);
      for (const double wrong : {before + error, std::nan(""), kInf}) {
        write_element(view, wrong, 0, 33, 1, 7);
        int found = 0;
        for (const auto& a : harness::compare_with_oracle(c, tensors, true, true)) found += !a.ok;
        EXPECT_EQ(found, 1) << dtype << " " << wrong;
      }
      write_element(view, before, 0, 33, 1, 7);
    }
  }
}

}  // namespace
}  // namespace fovea::test::hand
