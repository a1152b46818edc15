// Properties that hold bit for bit: strides, other batch members, invisible memory, repetition.
#include <cmath>

#include "support/engines.h"
#include "support/values.h"

namespace fovea::test::bits {
namespace {

using harness::Case;
using harness::CaseTensors;

class BitProperty : public EveryEngine {};

const char* const kDTypes[] = {"bf16", "f16", "f32", "f32 tf32"};

void expect_same_bits(const CaseTensors& a, const CaseTensors& b, const std::string& why) {
  EXPECT_EQ(bits_of(a.forward().out), bits_of(b.forward().out)) << why;
  EXPECT_EQ(bits_of(a.forward().lse), bits_of(b.forward().lse)) << why;
  if (!a.backward().dq.given()) return;
  EXPECT_EQ(bits_of(a.backward().dq), bits_of(b.backward().dq)) << why;
  EXPECT_EQ(bits_of(a.backward().dk), bits_of(b.backward().dk)) << why;
  EXPECT_EQ(bits_of(a.backward().dv), bits_of(b.backward().dv)) << why;
}

// Which engine a GPU prefers may depend on whether rows begin on 16 bytes: the bits are those of
// the engine then.
bool engine_depends_on_strides(const Engine& engine) { return engine.backend == "best"; }

// 10: any legal strides = contiguous.
TEST_P(BitProperty, StridesDoNotMatter) {
  const std::vector<const char*> any = {"order=bshd", "order=bhsd pad=1", "order=bshd pad=13"};
  const std::vector<const char*> aligned = {"order=bshd", "order=bhsd pad=8", "order=bshd pad=24"};
  for (const char* dtype : kDTypes) {
    for (const char* layout : {"", "varlen"}) {
      const std::string base =
          "b=2 hq=4 hkv=2 q=50 kv=83 d=40 mask=causal pass=fwd,bwd "
          "deterministic " +
          std::string(layout) + " dtype=" + dtype;
      const Case plain = must_parse(base);
      CaseTensors expected(plain);
      run(GetParam(), plain, expected);
      for (const char* order : engine_depends_on_strides(GetParam()) ? aligned : any) {
        const Case c = must_parse(base + " " + order);
        CaseTensors t(c);
        run(GetParam(), c, t);
        expect_same_bits(t, expected, reproduce(GetParam(), c));
      }
    }
  }
}

// 10: a tensor expanded over heads and batch by strides of 0 = the same values written out.
TEST_P(BitProperty, StrideZeroDoesNotMatter) {
  if (engine_depends_on_strides(GetParam()))
    GTEST_SKIP() << "strides of 0 have an engine of theirs";
  for (const char* dtype : kDTypes) {
    const Case c = must_parse("b=2 hq=4 hkv=2 q=20 kv=45 d=32 deterministic pass=fwd,bwd dtype=" +
                              std::string(dtype));
    CaseTensors expanded(c), written(c);
    const auto expand = [](TensorView& view) { view.strides[0] = view.strides[2] = 0; };
    for (auto* t : {static_cast<AttentionInputs*>(&expanded.forward()),
                    static_cast<AttentionInputs*>(&expanded.backward())}) {
      expand(t->k);
      expand(t->v);
    }
    expand(expanded.backward().dout);
    copy_values(expanded.forward().k, written.forward().k);
    copy_values(expanded.forward().v, written.forward().v);
    copy_values(expanded.backward().dout, written.backward().dout);
    written.accept_inputs();
    run(GetParam(), c, expanded);
    run(GetParam(), c, written);
    expect_same_bits(expanded, written, reproduce(GetParam(), c));
  }
}

// 11: a batch member's rows do not depend on the other members.
TEST_P(BitProperty, BatchMembersAreAlone) {
  for (const char* dtype : kDTypes) {
    const Case c = must_parse(
        "b=3 hq=2 q=40 kv=70 d=32 mask=causal pass=fwd,bwd deterministic "
        "dtype=" +
        std::string(dtype));
    CaseTensors a(c), b(c);
    for (const int64_t other : {0, 2}) {
      fill_values(slice(b.forward().q, 0, other, other + 1), 3);
      fill_values(slice(b.forward().k, 0, other, other + 1), NAN);
      fill_values(slice(b.forward().v, 0, other, other + 1), INFINITY);
    }
    b.accept_inputs();
    run(GetParam(), c, a);
    run(GetParam(), c, b);
    for (const auto& [x, y] :
         {std::pair(a.forward().out, b.forward().out), std::pair(a.forward().lse, b.forward().lse),
          std::pair(a.backward().dq, b.backward().dq), std::pair(a.backward().dk, b.backward().dk),
          std::pair(a.backward().dv, b.backward().dv)}) {
      EXPECT_EQ(bits_of(slice(x, 0, 1, 2)), bits_of(slice(y, 0, 1, 2))) << reproduce(GetParam(), c);
    }
  }
}

// 12: keys that no query sees may hold anything.
TEST_P(BitProperty, InvisibleKeysNeverMatter) {
  for (const char* dtype : kDTypes) {
    for (const char* hide :
         {"mask=window:5:inf", "mask=causal keylens=50,0", "keylens=31,7", "boolmask=bhq"}) {
      const Case c = must_parse("b=2 hq=2 q=20 kv=90 d=32 pass=fwd,bwd deterministic " +
                                std::string(hide) + " dtype=" + dtype);
      CaseTensors a(c), b(c);
      const AttentionInputs& in = b.forward();
      for (int64_t batch = 0; batch < 2; ++batch) {
        for (int64_t j = 0; j < 90; ++j) {
          bool hidden = false;
          if (in.key_lengths.given())
            hidden = static_cast<double>(j) >= harness::read_element(in.key_lengths, batch);
          if (in.mask.given()) hidden = harness::read_element(in.mask, 0, 0, 0, j) == 0;
          if (c.problem.mask.left != Mask::kUnbounded) hidden = j < 90 - 20 - c.problem.mask.left;
          if (!hidden) continue;
          const double bad = j % 2 == 0 ? NAN : INFINITY;
          const auto row = [&](const TensorView& t) {
            return slice(slice(t, 0, batch, batch + 1), 1, j, j + 1);
          };
          fill_values(row(in.k), bad);
          fill_values(row(in.v), bad);
        }
      }
      b.accept_inputs();
      run(GetParam(), c, a);
      run(GetParam(), c, b);
      expect_same_bits(a, b, reproduce(GetParam(), c));
    }
  }
}

// 12: a key hidden from some rows only: its value must not reach those rows, nor its gradients
// theirs.
TEST_P(BitProperty, ABadValueReachesOnlyRowsThatSeeIt) {
  for (const char* dtype : kDTypes) {
    const Case c = must_parse("hq=2 q=70 kv=70 d=32 mask=causal pass=fwd,bwd deterministic dtype=" +
                              std::string(dtype));
    CaseTensors a(c), b(c);
    fill_values(slice(b.forward().k, 1, 41, 42), NAN);
    fill_values(slice(b.forward().v, 1, 41, 42), NAN);
    b.accept_inputs();
    run(GetParam(), c, a);
    run(GetParam(), c, b);
    const std::string why = reproduce(GetParam(), c);
    const auto before = [](const TensorView& t) { return slice(t, 1, 0, 41); };
    EXPECT_EQ(bits_of(before(a.forward().out)), bits_of(before(b.forward().out))) << why;
    EXPECT_EQ(bits_of(before(a.backward().dq)), bits_of(before(b.backward().dq))) << why;
    for (const double x : values_of(slice(b.forward().out, 1, 41, 70))) {
      ASSERT_TRUE(std::isnan(x)) << why;
    }
  }
}

// 14: the same call gives the same bits, a thousand times, on several threads.
TEST_P(BitProperty, AThousandTimesTheSame) {
  for (const char* dtype : kDTypes) {
    const Case c = must_parse(
        "b=2 hq=4 hkv=2 q=24 kv=65 d=16 mask=causal pass=fwd,bwd "
        "deterministic sink dtype=" +
        std::string(dtype));
    CaseTensors first(c), again(c);
    run(GetParam(), c, first, 4);
    harness::Calls calls = calls_on(GetParam(), plan_on(GetParam(), c.problem, 4), again);
    const auto out = bits_of(first.forward().out), dq = bits_of(first.backward().dq),
               dk = bits_of(first.backward().dk), dv = bits_of(first.backward().dv),
               dsink = bits_of(first.backward().dsink);
    const int times = GetParam().backend == "reference" ? 50 : 1000;
    for (int n = 0; n < times; ++n) {
      again.poison_outputs();
      ASSERT_TRUE(calls.forward().ok());
      ASSERT_TRUE(calls.backward().ok());
      ASSERT_EQ(bits_of(again.forward().out), out) << n << reproduce(GetParam(), c);
      ASSERT_EQ(bits_of(again.backward().dq), dq) << n << reproduce(GetParam(), c);
      ASSERT_EQ(bits_of(again.backward().dk), dk) << n << reproduce(GetParam(), c);
      ASSERT_EQ(bits_of(again.backward().dv), dv) << n << reproduce(GetParam(), c);
      ASSERT_EQ(bits_of(again.backward().dsink), dsink) << n << reproduce(GetParam(), c);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, BitProperty, testing::ValuesIn(every_engine()), engine_name);

}  // namespace
}  // namespace fovea::test::bits
