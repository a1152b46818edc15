// Properties of the forward pass that need no oracle: they hold at any size and name the rule they
// break.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "harness/random.h"
#include "support/engines.h"
#include "support/values.h"

namespace fovea::test::forward {
namespace {

using harness::Case;
using harness::CaseTensors;
using harness::hash64;
using harness::read_element;
using harness::write_element;

class ForwardProperty : public EveryEngine {};

const char* const kDTypes[] = {"bf16", "f16", "f32"};

void expect_close(const TensorView& a, const TensorView& b, const std::string& why) {
  EXPECT_LE(relative_difference(values_of(a), values_of(b)), tolerance_of(b.dtype)) << why;
}

// Positive so that it cannot pass by mistake: NaN <= x is false.
void expect_lse_close(const TensorView& a, const TensorView& b, DType dtype,
                      const std::string& why) {
  EXPECT_LE(relative_difference(values_of(a), values_of(b), 1), dtype == DType::kF32 ? 1e-5 : 1e-3)
      << why;
}

// 1: one key: out = v, lse = scale * q . k.
TEST_P(ForwardProperty, OneKeyGivesItsValue) {
  for (const char* dtype : kDTypes) {
    const Case c = must_parse("b=2 hq=4 hkv=2 q=37 kv=1 d=64 dtype=" + std::string(dtype));
    CaseTensors t(c);
    run(GetParam(), c, t);
    const ForwardTensors& f = t.forward();
    for (int64_t b = 0; b < 2; ++b)
      for (int64_t h = 0; h < 4; ++h)
        for (int64_t i = 0; i < 37; ++i) {
          double score = 0;
          for (int64_t d = 0; d < 64; ++d) {
            score += read_element(f.q, b, i, h, d) * read_element(f.k, b, 0, h / 2, d) / 8;
            const double v = read_element(f.v, b, 0, h / 2, d);
            // A weight divided by itself: exact, but for the last bits of f32.
            const double slack = c.problem.dtype == DType::kF32 ? 0x1p-22 * std::abs(v) : 0;
            ASSERT_NEAR(read_element(f.out, b, i, h, d), v, slack) << reproduce(GetParam(), c);
          }
          ASSERT_NEAR(read_element(f.lse, b, h, i), score, 1e-4) << reproduce(GetParam(), c);
        }
  }
}

// The same where logits are bounded, and may be weighed without a look at the largest: however
// small the only weight is, half precision must not lose it.
TEST_P(ForwardProperty, OneKeyOfABoundedProblemGivesItsValue) {
  for (const char* dtype : kDTypes) {
    for (const char* dim : {"16", "64"}) {
      const Case c =
          must_parse("b=2 hq=4 hkv=2 q=37 kv=1 scale=1 logit_bound=44 d=" + std::string(dim) +
                     " dtype=" + dtype);
      CaseTensors t(c);
      run(GetParam(), c, t);
      const ForwardTensors& f = t.forward();
      for (int64_t i = 0; i < f.out.elements(); ++i) {
        const int64_t d = c.problem.dim_v, h = i / d % 4, b = i / d / 4 / 37;
        const double v = read_element(f.v, b, 0, h / 2, i % d);
        ASSERT_NEAR(read_element(f.out, b, i / d / 4 % 37, h, i % d), v, 0x1p-7 * std::abs(v))
            << reproduce(GetParam(), c);
      }
    }
  }
}

// 2: values that are all the same come out the same; any output lies between its values.
TEST_P(ForwardProperty, OutputIsAMeanOfVisibleValues) {
  for (const char* dtype : kDTypes) {
    for (const char* mask : {"", "mask=causal", "mask=window:10:3"}) {
      const Case c =
          must_parse("b=2 hq=2 q=70 kv=91 d=32 " + std::string(mask) + " dtype=" + dtype);
      CaseTensors t(c);
      fill_values(t.forward().v, 1.25);
      t.accept_inputs();
      run(GetParam(), c, t);
      for (const double x : values_of(t.forward().out)) {
        ASSERT_NEAR(x, 1.25, 1.25 * tolerance_of(c.problem.dtype)) << reproduce(GetParam(), c);
      }
      CaseTensors u(c);
      run(GetParam(), c, u);
      const ForwardTensors& f = u.forward();
      for (int64_t i = 0; i < 70; ++i) {
        const int64_t p = i + 21;
        const Mask& m = c.problem.mask;
        const int64_t lo = m.left == Mask::kUnbounded ? 0 : std::max<int64_t>(0, p - m.left);
        const int64_t hi = m.right == Mask::kUnbounded ? 90 : std::min<int64_t>(90, p + m.right);
        for (int64_t d = 0; d < 32; ++d) {
          double least = read_element(f.v, 1, lo, 1, d), most = least;
          for (int64_t j = lo; j <= hi; ++j) {
            least = std::min(least, read_element(f.v, 1, j, 1, d));
            most = std::max(most, read_element(f.v, 1, j, 1, d));
          }
          const double slack = 4 * tolerance_of(c.problem.dtype);
          const double x = read_element(f.out, 1, i, 1, d);
          ASSERT_GE(x, least - slack) << reproduce(GetParam(), c);
          ASSERT_LE(x, most + slack) << reproduce(GetParam(), c);
        }
      }
    }
  }
}

std::vector<int64_t> permutation(int64_t size, uint64_t seed) {
  std::vector<int64_t> order(static_cast<size_t>(size));
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[hash64(seed + i) % i]);
  return order;
}

void copy_rows(const TensorView& from, const TensorView& to, const std::vector<int64_t>& order) {
  for (size_t i = 0; i < order.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    copy_values(slice(from, 1, order[i], order[i] + 1), slice(to, 1, at, at + 1));
  }
}

// 3: the order of keys does not matter; the order of queries is the order of rows.
TEST_P(ForwardProperty, OrderOfKeysAndQueries) {
  for (const char* dtype : kDTypes) {
    const Case c = must_parse("b=2 hq=4 hkv=2 q=83 kv=203 d=64 dtype=" + std::string(dtype));
    CaseTensors t(c), keys(c), queries(c);
    const auto key_order = permutation(203, 1), query_order = permutation(83, 2);
    copy_rows(t.forward().k, keys.forward().k, key_order);
    copy_rows(t.forward().v, keys.forward().v, key_order);
    copy_rows(t.forward().q, queries.forward().q, query_order);
    keys.accept_inputs();
    queries.accept_inputs();
    run(GetParam(), c, t);
    run(GetParam(), c, keys);
    run(GetParam(), c, queries);
    expect_close(keys.forward().out, t.forward().out, reproduce(GetParam(), c));
    expect_lse_close(keys.forward().lse, t.forward().lse, c.problem.dtype,
                     reproduce(GetParam(), c));
    CaseTensors expected(c);
    copy_rows(t.forward().out, expected.forward().out, query_order);
    expect_close(queries.forward().out, expected.forward().out, reproduce(GetParam(), c));
  }
}

// 4: a vector added to all keys moves lse by scale * q . c and nothing else.
TEST_P(ForwardProperty, KeysShiftedTogether) {
  for (const char* dtype : kDTypes) {
    const Case c = must_parse("hq=2 q=50 kv=77 d=32 mask=causal dtype=" + std::string(dtype));
    CaseTensors t(c), shifted(c);
    for (int64_t j = 0; j < 77; ++j)
      for (int64_t h = 0; h < 2; ++h)
        for (int64_t d = 0; d < 32; ++d) {
          // Sixteenths within +-4, so that the sum is exact in every dtype.
          const double x = std::round(read_element(t.forward().k, 0, j, h, d) * 8) / 16;
          write_element(t.forward().k, x, 0, j, h, d);
          write_element(shifted.forward().k, x + (d % 2 == 0 ? 1 : -0.5), 0, j, h, d);
        }
    t.accept_inputs();
    shifted.accept_inputs();
    run(GetParam(), c, t);
    run(GetParam(), c, shifted);
    expect_close(shifted.forward().out, t.forward().out, reproduce(GetParam(), c));
    for (int64_t h = 0; h < 2; ++h)
      for (int64_t i = 0; i < 50; ++i) {
        double shift = 0;
        for (int64_t d = 0; d < 32; ++d) {
          shift += read_element(t.forward().q, 0, i, h, d) * (d % 2 == 0 ? 1 : -0.5);
        }
        ASSERT_NEAR(read_element(shifted.forward().lse, 0, h, i),
                    read_element(t.forward().lse, 0, h, i) + shift / std::sqrt(32.0), 1e-4)
            << reproduce(GetParam(), c);
      }
  }
}

// 6: causal = a boolean mask of the same triangle = a bias of -inf above it.
TEST_P(ForwardProperty, CausalInThreeWays) {
  for (const char* dtype : kDTypes) {
    const std::string base = "b=2 hq=2 q=60 kv=90 d=32 pass=fwd,bwd dtype=" + std::string(dtype);
    const Case causal = must_parse(base + " mask=causal");
    const Case masked = must_parse(base + " boolmask=bh");
    const Case biased = must_parse(base + " bias=bh");
    CaseTensors t(causal), by_mask(masked), by_bias(biased);
    for (int64_t i = 0; i < 60; ++i)
      for (int64_t j = 0; j < 90; ++j) {
        const bool seen = j <= i + 30;
        write_element(by_mask.forward().mask, seen, 0, 0, i, j);
        write_element(by_bias.forward().bias, seen ? 0 : -INFINITY, 0, 0, i, j);
      }
    by_mask.accept_inputs();
    by_bias.accept_inputs();
    run(GetParam(), causal, t);
    for (auto* other : {&by_mask, &by_bias}) {
      const Case& c = other == &by_mask ? masked : biased;
      run(GetParam(), c, *other);
      const std::string why = reproduce(GetParam(), c);
      expect_close(other->forward().out, t.forward().out, why);
      expect_lse_close(other->forward().lse, t.forward().lse, c.problem.dtype, why);
      expect_close(other->backward().dq, t.backward().dq, why);
      expect_close(other->backward().dk, t.backward().dk, why);
      expect_close(other->backward().dv, t.backward().dv, why);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, ForwardProperty, testing::ValuesIn(every_engine()), engine_name);

}  // namespace
}  // namespace fovea::test::forward
