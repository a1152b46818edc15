// Inf and NaN in the inputs travel to the rows they touch and no further, forward and backward.
#include <cmath>
#include <string_view>

#include "support/engines.h"
#include "support/values.h"

namespace fovea::test {
namespace {

using harness::Case;
using harness::CaseTensors;

class Locality : public EveryEngine {};

// Head dims 16 and 32 have kernels of their own, the latter also for a scale of ln 2; so have
// masks, alone and beside other terms.
const char* const kKinds[] = {"d=16 dtype=bf16",
                              "d=16 dtype=f16",
                              "d=16 dtype=f32",
                              "d=16 dtype=f32 tf32",
                              "d=32 dtype=bf16",
                              "d=32 dtype=f16",
                              "d=32 scale=0.6931471805599453 dtype=bf16",
                              "d=64 boolmask dtype=bf16",
                              "d=64 boolmask alibi dtype=bf16",
                              "d=128 boolmask softcap=20 bias dtype=f16",
                              "d=64 boolmask dtype=f32",
                              "d=256 boolmask alibi dtype=bf16"};
constexpr int64_t kLength = 96, kBad = 37, kWindow = 11;

// Rows of one head and batch member whose every value is NaN, and rows that hold any.
struct NanRows {
  std::vector<bool> all, any;
};

NanRows nan_rows(const TensorView& t, int64_t b, int64_t h) {
  NanRows rows;
  for (int64_t i = 0; i < t.sizes[1]; ++i) {
    int64_t count = 0;
    for (int64_t d = 0; d < t.sizes[3]; ++d) {
      count += std::isnan(harness::read_element(t, b, i, h, d));
    }
    rows.all.push_back(count == t.sizes[3]);
    rows.any.push_back(count > 0);
  }
  return rows;
}

bool sees(int64_t i, int64_t j) { return j <= i && i - j <= kWindow; }

// Two batch members, two KV heads, groups of two; each query sees 11 keys back and none ahead, by
// the window or, where the kind has one, by a boolean mask.
Case windowed(const char* kind) {
  const bool by_mask = std::string_view(kind).find("boolmask") != std::string_view::npos;
  return must_parse("b=2 hq=4 hkv=2 q=96 kv=96 pass=fwd,bwd " +
                    std::string(by_mask ? "" : "mask=window:11:0 ") + kind);
}

CaseTensors tensors_of(const Case& c) {
  CaseTensors t(c);
  const TensorView& mask = t.forward().mask;
  if (!mask.given()) return t;
  for (int64_t b = 0; b < mask.sizes[0]; ++b) {
    for (int64_t h = 0; h < mask.sizes[1]; ++h) {
      for (int64_t i = 0; i < kLength; ++i) {
        for (int64_t j = 0; j < kLength; ++j) {
          harness::write_element(mask, sees(i, j) ? 1 : 0, b, h, i, j);
        }
      }
    }
  }
  return t;
}

// Expects NaN in exactly the rows of (batch 1, heads [first, end)) that `touched` names.
template <typename Touched>
void expect_nan_exactly(const TensorView& t, int64_t first, int64_t end, const Touched& touched,
                        const std::string& what) {
  for (int64_t b = 0; b < t.sizes[0]; ++b) {
    for (int64_t h = 0; h < t.sizes[2]; ++h) {
      const NanRows rows = nan_rows(t, b, h);
      for (int64_t i = 0; i < t.sizes[1]; ++i) {
        const bool expected = b == 1 && h >= first && h < end && touched(i);
        const auto at = static_cast<size_t>(i);
        ASSERT_EQ(rows.any[at], expected)
            << what << " batch " << b << " head " << h << " row " << i;
        ASSERT_EQ(rows.all[at], expected)
            << what << " batch " << b << " head " << h << " row " << i;
      }
    }
  }
}

TensorView row(const TensorView& t, int64_t h) {
  return slice(slice(slice(t, 0, 1, 2), 1, kBad, kBad + 1), 2, h, h + 1);
}

// dq of a row that sees the key is NaN; dk and dv are of the keys that such a row sees.
TEST_P(Locality, BadKey) {
  for (const char* kind : kKinds) {
    const Case c = windowed(kind);
    const std::string why = reproduce(GetParam(), c);
    CaseTensors t = tensors_of(c);
    fill_values(row(t.forward().k, 1), NAN);
    t.accept_inputs();
    run(GetParam(), c, t);
    const auto touched = [](int64_t i) { return sees(i, kBad); };
    const auto beside = [](int64_t j) { return std::abs(j - kBad) <= kWindow; };
    expect_nan_exactly(t.forward().out, 2, 4, touched, "out" + why);
    expect_nan_exactly(t.backward().dq, 2, 4, touched, "dq" + why);
    expect_nan_exactly(t.backward().dk, 1, 2, beside, "dk" + why);
    expect_nan_exactly(t.backward().dv, 1, 2, beside, "dv" + why);
  }
}

// A bad value makes out, and through delta every gradient of the row, NaN; dv takes only weights.
TEST_P(Locality, BadValue) {
  for (const char* kind : kKinds) {
    const Case c = windowed(kind);
    const std::string why = reproduce(GetParam(), c);
    CaseTensors t = tensors_of(c);
    fill_values(row(t.forward().v, 0), NAN);
    t.accept_inputs();
    run(GetParam(), c, t);
    const auto touched = [](int64_t i) { return sees(i, kBad); };
    const auto beside = [](int64_t j) { return std::abs(j - kBad) <= kWindow; };
    expect_nan_exactly(t.forward().out, 0, 2, touched, "out" + why);
    for (const double x : values_of(t.forward().lse)) ASSERT_TRUE(std::isfinite(x)) << why;
    expect_nan_exactly(t.backward().dq, 0, 2, touched, "dq" + why);
    expect_nan_exactly(t.backward().dk, 0, 1, beside, "dk" + why);
    expect_nan_exactly(t.backward().dv, 0, 0, beside, "dv" + why);
  }
}

TEST_P(Locality, BadQuery) {
  for (const char* kind : kKinds) {
    const Case c = windowed(kind);
    const std::string why = reproduce(GetParam(), c);
    CaseTensors t = tensors_of(c);
    fill_values(row(t.forward().q, 3), NAN);
    t.accept_inputs();
    run(GetParam(), c, t);
    const auto itself = [](int64_t i) { return i == kBad; };
    const auto seen = [](int64_t j) { return sees(kBad, j); };
    expect_nan_exactly(t.forward().out, 3, 4, itself, "out" + why);
    expect_nan_exactly(t.backward().dq, 3, 4, itself, "dq" + why);
    expect_nan_exactly(t.backward().dk, 1, 2, seen, "dk" + why);
    expect_nan_exactly(t.backward().dv, 1, 2, seen, "dv" + why);
  }
}

TEST_P(Locality, BadIncomingGradient) {
  for (const char* kind : kKinds) {
    const Case c = windowed(kind);
    const std::string why = reproduce(GetParam(), c);
    CaseTensors t = tensors_of(c);
    fill_values(row(t.backward().dout, 2), NAN);
    t.accept_inputs();
    run(GetParam(), c, t);
    const auto itself = [](int64_t i) { return i == kBad; };
    const auto seen = [](int64_t j) { return sees(kBad, j); };
    const auto none = [](int64_t) { return false; };
    expect_nan_exactly(t.forward().out, 0, 0, none, "out" + why);
    expect_nan_exactly(t.backward().dq, 2, 3, itself, "dq" + why);
    expect_nan_exactly(t.backward().dk, 1, 2, seen, "dk" + why);
    expect_nan_exactly(t.backward().dv, 1, 2, seen, "dv" + why);
  }
}

// An infinite value is an infinite mean, not NaN, in the rows that see it.
TEST_P(Locality, InfiniteValue) {
  for (const char* kind : kKinds) {
    Case c = windowed(kind);
    c.backward = false;
    CaseTensors t = tensors_of(c);
    fill_values(row(t.forward().v, 0), INFINITY);
    t.accept_inputs();
    run(GetParam(), c, t);
    for (int64_t i = 0; i < kLength; ++i) {
      for (int64_t d = 0; d < 16; ++d) {
        const double x = harness::read_element(t.forward().out, 1, i, 1, d);
        if (sees(i, kBad)) {
          ASSERT_EQ(x, INFINITY) << i << reproduce(GetParam(), c);
        } else {
          ASSERT_TRUE(std::isfinite(x)) << i << reproduce(GetParam(), c);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, Locality, testing::ValuesIn(every_engine()), engine_name);

}  // namespace
}  // namespace fovea::test
