// Properties of splitting: keys over parts that are merged, sequences over a pack, heads over
// groups.
#include <algorithm>
#include <cmath>

#include "support/engines.h"
#include "support/values.h"

namespace fovea::test::split {
namespace {

using harness::Case;
using harness::CaseTensors;

class SplitProperty : public EveryEngine {};

const char* const kDTypes[] = {"bf16", "f16", "f32"};

void expect_close(const TensorView& a, const TensorView& b, double times, const std::string& why) {
  EXPECT_LE(relative_difference(values_of(a), values_of(b)), times * tolerance_of(b.dtype)) << why;
}

Case with_kv(const Case& c, int64_t kv_len) {
  Case part = c;
  part.problem.kv_len = kv_len;
  return part;
}

// Copies keys [begin, end) of the whole into a part.
void take_keys(const CaseTensors& whole, CaseTensors& part, int64_t begin, int64_t end) {
  copy_values(whole.forward().q, part.forward().q);
  copy_values(slice(whole.forward().k, 1, begin, end), part.forward().k);
  copy_values(slice(whole.forward().v, 1, begin, end), part.forward().v);
  if (whole.backward().dout.given()) copy_values(whole.backward().dout, part.backward().dout);
  part.accept_inputs();
}

// 5 and 17: split the keys anywhere, merge in any order = whole; and so the gradients, from the
// merged out and lse.
TEST_P(SplitProperty, KeysSplitAndMerged) {
  for (const char* dtype : kDTypes) {
    const Case c =
        must_parse("b=2 hq=4 hkv=2 q=45 kv=130 d=32 pass=fwd,bwd dtype=" + std::string(dtype));
    const std::string why = reproduce(GetParam(), c);
    CaseTensors whole(c);
    run(GetParam(), c, whole);
    for (const int64_t at : {1, 64, 77, 129}) {
      const Case c0 = with_kv(c, at), c1 = with_kv(c, 130 - at);
      CaseTensors part0(c0), part1(c1), merged(c);
      take_keys(whole, part0, 0, at);
      take_keys(whole, part1, at, 130);
      run(GetParam(), c0, part0);
      run(GetParam(), c1, part1);
      const PartialResult parts[] = {{part1.forward().out, part1.forward().lse},
                                     {part0.forward().out, part0.forward().lse}};
      const Status done = merge(parts, 2, merged.forward().out, merged.forward().lse);
      ASSERT_TRUE(done.ok()) << done.message();
      expect_close(merged.forward().out, whole.forward().out, 1, why);
      EXPECT_LE(
          relative_difference(values_of(merged.forward().lse), values_of(whole.forward().lse), 1),
          1e-3);

      copy_values(merged.forward().out, part0.forward().out);
      copy_values(merged.forward().lse, part0.forward().lse);
      copy_values(merged.forward().out, part1.forward().out);
      copy_values(merged.forward().lse, part1.forward().lse);
      const auto backward = [&](const Case& part_case, CaseTensors& part) {
        part.poison_gradients();
        const Plan plan = plan_on(GetParam(), part_case.problem);
        const Status s = calls_on(GetParam(), plan, part).backward();
        ASSERT_TRUE(s.ok()) << s.message();
      };
      backward(c0, part0);
      backward(c1, part1);
      expect_close(part0.backward().dk, slice(whole.backward().dk, 1, 0, at), 2, why);
      expect_close(part1.backward().dk, slice(whole.backward().dk, 1, at, 130), 2, why);
      expect_close(part0.backward().dv, slice(whole.backward().dv, 1, 0, at), 2, why);
      expect_close(part1.backward().dv, slice(whole.backward().dv, 1, at, 130), 2, why);
      std::vector<double> dq = values_of(part0.backward().dq);
      const std::vector<double> other = values_of(part1.backward().dq);
      for (size_t i = 0; i < dq.size(); ++i) dq[i] += other[i];
      EXPECT_LE(relative_difference(dq, values_of(whole.backward().dq)),
                2 * tolerance_of(c.problem.dtype))
          << why;
    }
  }
}

// However many threads share a call, and so however it is cut: what one thread makes.
TEST_P(SplitProperty, ThreadsLeaveNoTrace) {
  if (GetParam().device.type != DeviceType::kCpu) GTEST_SKIP() << "threads of the host";
  for (const char* dtype : kDTypes) {
    for (const char* rest :
         {"q=300 kv=300 mask=causal", "q=500 kv=260 mask=causal", "q=260 kv=500 mask=window:70:0",
          "q=300 kv=300 mask=window:9:5", "q=300 kv=300 mask=causal prefix=100",
          "q=300 kv=300 mask=causal varlen q_lens=300,130 kv_lens=200,300 b=2",
          "q=200 kv=300 keylens=290,60 b=2 mask=causal", "q=300 kv=300",
          "b=2 hq=5 q=150 kv=200 dv=40 mask=causal", "hq=9 hkv=3 q=70 kv=150"}) {
      const Case c =
          must_parse("hq=2 hkv=1 d=24 pass=fwd,bwd " + std::string(rest) + " dtype=" + dtype);
      const std::string why = reproduce(GetParam(), c);
      CaseTensors alone(c);
      run(GetParam(), c, alone, 1);
      for (const int threads : {2, 5, 16}) {
        CaseTensors shared(c);
        run(GetParam(), c, shared, threads);
        const auto expect_same = [&](const TensorView& a, const TensorView& b) {
          const std::vector<double> one = values_of(b);
          double largest = 0;
          for (const double x : one) largest = std::max(largest, std::abs(x));
          EXPECT_LE(relative_difference(values_of(a), one, largest), tolerance_of(b.dtype))
              << threads << " threads" << why;
        };
        expect_same(shared.forward().out, alone.forward().out);
        expect_same(shared.backward().dq, alone.backward().dq);
        expect_same(shared.backward().dk, alone.backward().dk);
        expect_same(shared.backward().dv, alone.backward().dv);
      }
    }
  }
}

// 7: a pack of sequences = each alone; empty ones among them disturb nothing.
TEST_P(SplitProperty, PackedIsALoopOverSequences) {
  for (const char* dtype : kDTypes) {
    for (const char* mask : {"", "mask=causal", "mask=window:12:4"}) {
      const Case c = must_parse(
          "b=5 hq=4 hkv=2 q=40 kv=70 d=32 varlen q_lens=0,17,40,1,0 "
          "kv_lens=5,33,70,64,0 pass=fwd,bwd " +
          std::string(mask) + " dtype=" + dtype);
      const std::string why = reproduce(GetParam(), c);
      CaseTensors pack(c);
      run(GetParam(), c, pack);
      int64_t q0 = 0, kv0 = 0;
      for (size_t b = 0; b < 5; ++b) {
        const int64_t q = c.q_lens[b], kv = c.kv_lens[b];
        Case alone = must_parse("hq=4 hkv=2 d=32 pass=fwd,bwd q=" + std::to_string(q) +
                                " kv=" + std::to_string(kv) + " " + mask + " dtype=" + dtype);
        CaseTensors t(alone);
        const auto rows = [](const TensorView& view, int64_t first, int64_t count) {
          TensorView part = slice(view, 0, first, first + count);  // [n, h, d] -> [1, n, h, d]
          part.rank = 4;
          part.sizes = {1, part.sizes[0], part.sizes[1], part.sizes[2]};
          part.strides = {0, part.strides[0], part.strides[1], part.strides[2]};
          return part;
        };
        copy_values(rows(pack.forward().q, q0, q), t.forward().q);
        copy_values(rows(pack.forward().k, kv0, kv), t.forward().k);
        copy_values(rows(pack.forward().v, kv0, kv), t.forward().v);
        copy_values(rows(pack.backward().dout, q0, q), t.backward().dout);
        t.accept_inputs();
        run(GetParam(), alone, t);
        expect_close(rows(pack.forward().out, q0, q), t.forward().out, 1, why);
        expect_close(rows(pack.backward().dq, q0, q), t.backward().dq, 1, why);
        expect_close(rows(pack.backward().dk, kv0, kv), t.backward().dk, 1, why);
        expect_close(rows(pack.backward().dv, kv0, kv), t.backward().dv, 1, why);
        q0 += q;
        kv0 += kv;
      }
    }
  }
}

// 7: padding named by a key length = keys cut off.
TEST_P(SplitProperty, KeyLengthIsTruncation) {
  for (const char* dtype : kDTypes) {
    const std::string base = "hq=2 q=30 d=32 mask=causal pass=fwd,bwd dtype=" + std::string(dtype);
    const Case padded = must_parse(base + " kv=100 keylens=61"), cut = must_parse(base + " kv=61");
    CaseTensors a(padded), b(cut);
    take_keys(a, b, 0, 61);
    run(GetParam(), padded, a);
    run(GetParam(), cut, b);
    const std::string why = reproduce(GetParam(), padded);
    expect_close(a.forward().out, b.forward().out, 1, why);
    expect_close(a.backward().dq, b.backward().dq, 1, why);
    expect_close(slice(a.backward().dk, 1, 0, 61), b.backward().dk, 1, why);
    expect_close(slice(a.backward().dv, 1, 0, 61), b.backward().dv, 1, why);
    for (const double x : values_of(slice(a.backward().dk, 1, 61, 100))) EXPECT_EQ(x, 0) << why;
    for (const double x : values_of(slice(a.backward().dv, 1, 61, 100))) EXPECT_EQ(x, 0) << why;
  }
}

// 9: grouped heads = KV heads repeated; their gradients are the sums over the group.
TEST_P(SplitProperty, GroupsAreRepeatedHeads) {
  for (const char* dtype : kDTypes) {
    const std::string base =
        "b=2 hq=6 q=33 kv=65 d=32 mask=causal pass=fwd,bwd dtype=" + std::string(dtype);
    const Case grouped = must_parse(base + " hkv=2"), repeated = must_parse(base + " hkv=6");
    CaseTensors a(grouped), b(repeated);
    for (int64_t h = 0; h < 6; ++h) {
      copy_values(slice(a.forward().k, 2, h / 3, h / 3 + 1), slice(b.forward().k, 2, h, h + 1));
      copy_values(slice(a.forward().v, 2, h / 3, h / 3 + 1), slice(b.forward().v, 2, h, h + 1));
    }
    b.accept_inputs();
    run(GetParam(), grouped, a);
    run(GetParam(), repeated, b);
    const std::string why = reproduce(GetParam(), grouped);
    expect_close(a.forward().out, b.forward().out, 1, why);
    expect_close(a.backward().dq, b.backward().dq, 1, why);
    for (const auto& [sum, each] : {std::pair(a.backward().dk, b.backward().dk),
                                    std::pair(a.backward().dv, b.backward().dv)}) {
      for (int64_t head = 0; head < 2; ++head) {
        std::vector<double> total = values_of(slice(each, 2, 3 * head, 3 * head + 1));
        for (int64_t h = 3 * head + 1; h < 3 * head + 3; ++h) {
          const std::vector<double> one = values_of(slice(each, 2, h, h + 1));
          for (size_t i = 0; i < one.size(); ++i) total[i] += one[i];
        }
        EXPECT_LE(relative_difference(values_of(slice(sum, 2, head, head + 1)), total),
                  2 * tolerance_of(grouped.problem.dtype))
            << why;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, SplitProperty, testing::ValuesIn(every_engine()), engine_name);

}  // namespace
}  // namespace fovea::test::split
