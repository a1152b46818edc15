// Softmax on data that is made to break it: engines weigh most scores without regard to the largest
// of them, and find out where that is wrong.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "harness/accuracy.h"
#include "support/engines.h"

namespace fovea::test::scores {
namespace {

using harness::Case;
using harness::CaseTensors;

bool on_host() { return fast_engines().front().device == Device::cpu(); }

// f32 where it is what most callers have.
std::vector<const char*> dtypes() {
  return on_host() ? std::vector{"bf16", "f16", "f32"} : std::vector{"bf16", "f16"};
}

// Multiply-adds for the oracle, per case: fewer where every instruction set has its turn.
double cost_of(const Engine& engine) { return engine.device == Device::cpu() ? 4e7 : 2e8; }

class Scores : public EngineTest {};

// Adds to the score of key j of every query what `bump` says, in units of natural log.
void bump_scores(const Case& c, CaseTensors& t, const std::function<double(int64_t)>& bump) {
  const AttentionProblem& p = c.problem;
  const double unit = std::sqrt(static_cast<double>(p.dim_qk));  // 1 / scale
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.head_q; ++h) {
      for (int64_t i = 0; i < p.q_len; ++i) harness::write_element(t.forward().q, 1.0, b, i, h, 0);
    }
    for (int64_t h = 0; h < p.head_kv; ++h) {
      for (int64_t j = 0; j < p.kv_len; ++j) {
        harness::write_element(t.forward().k, bump(j) * unit, b, j, h, 0);
      }
    }
  }
  t.accept_inputs();
}

// Weights refer to a score of the keys that are met first, which are the last ones. Scores that
// outgrow it slowly, at once, or by more than floats can hold must not show in the result.
TEST_F(Scores, ScoresThatOutgrowTheirReference) {
  const int64_t keys = 1100;
  const auto at = [](int64_t key, double size) {
    return [=](int64_t j) { return j == key ? size : 0.0; };
  };
  const std::pair<const char*, std::function<double(int64_t)>> bumps[] = {
      {"rising", [](int64_t j) { return 0.05 * static_cast<double>(j); }},
      {"falling", [](int64_t j) { return -0.05 * static_cast<double>(j); }},
      {"rising fast", [](int64_t j) { return 0.9 * static_cast<double>(j); }},
      {"falling fast", [](int64_t j) { return -0.9 * static_cast<double>(j); }},
      {"all equal", [](int64_t) { return 3.0; }},
      {"all large", [](int64_t) { return 900.0; }},
      {"all small", [](int64_t) { return -900.0; }},
      {"first, 20", at(0, 20)},
      {"first, 80", at(0, 80)},
      {"first, about 2^127", at(0, 91)},
      {"first, 1500", at(0, 1500)},
      {"middle, 40", at(keys / 2, 40)},
      {"middle, 1500", at(keys / 2, 1500)},
      {"last, 1500", at(keys - 1, 1500)},
      {"alternating", [](int64_t j) { return j % 2 == 0 ? 120.0 : -120.0; }},
  };
  for (const char* dtype : dtypes()) {
    for (const char* rest :
         {"d=64", "d=128", "d=64 mask=causal", "d=128 mask=causal", "d=16", "d=32 mask=causal"}) {
      const Case c =
          must_parse("hq=3 q=300 kv=" + std::to_string(keys) + " " + rest + " dtype=" + dtype);
      for (const auto& [name, bump] : bumps) {
        CaseTensors tensors(c);
        bump_scores(c, tensors, bump);
        for (const Engine& engine : fast_engines()) {
          run(engine, c, tensors);
          for (const harness::Accuracy& a :
               harness::compare_with_oracle(c, tensors, true, false, cost_of(engine))) {
            EXPECT_TRUE(a.ok) << name << ": " << a.tensor << ": error " << a.max_err << ", bound "
                              << a.bound << reproduce(engine, c);
          }
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Softcap has a series for small scores, another for larger ones, and special functions for the
// rest: whichever scores come when.
TEST_F(Scores, SoftcapNearAndFar) {
  const int64_t keys = 1100;
  for (const char* dtype : dtypes()) {
    for (const char* rest : {"d=64 softcap=30", "d=128 softcap=30", "d=64 softcap=30 mask=causal",
                             "d=96 softcap=30", "d=128 softcap=70"}) {
      const Case c =
          must_parse("hq=3 q=300 kv=" + std::to_string(keys) + " " + rest + " dtype=" + dtype);
      for (const double share : {0.2, 0.4, -0.8, 5.0}) {  // of the bound
        for (const int64_t key : {int64_t{0}, keys - 1}) {
          CaseTensors tensors(c);
          bump_scores(c, tensors, [&](int64_t j) {
            return c.problem.softcap * (j == key ? share : 0.02 * static_cast<double>(j % 7));
          });
          for (const Engine& engine : fast_engines()) {
            run(engine, c, tensors);
            for (const harness::Accuracy& a :
                 harness::compare_with_oracle(c, tensors, true, false, cost_of(engine))) {
              EXPECT_TRUE(a.ok) << share << " at " << key << ": " << a.tensor << ": error "
                                << a.max_err << ", bound " << a.bound << reproduce(engine, c);
            }
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

// What is not finite goes where it is seen and nowhere else, also where scores outgrow their
// reference.
TEST_F(Scores, ValuesThatAreNotFinite) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInf = std::numeric_limits<double>::infinity();
  for (const char* dtype : dtypes()) {
    std::vector<const char*> shapes = {"q=400 kv=400 d=64", "q=400 kv=400 d=128",
                                       "q=400 kv=400 d=256", "q=400 kv=4400 d=128"};
    // The last in parts of the keys; on the CPU few rows meet keys where they lie.
    if (on_host()) shapes.insert(shapes.end(), {"q=3 kv=400 d=64", "q=3 kv=400 d=20"});
    for (const char* rest : shapes) {
      const Case c = must_parse("hq=2 mask=causal " + std::string(rest) + " dtype=" + dtype);
      const int64_t rows = c.problem.q_len, middle = std::min<int64_t>(130, rows / 2);
      const int64_t before = c.problem.kv_len - rows;  // keys that all rows see
      for (const double bad : {kNaN, kInf, -kInf}) {
        for (const auto& [row, first_score] :
             {std::pair{middle, 0.0}, {rows - 1, 0.0}, {middle, 1500.0}}) {
          const int64_t key = before + row;
          CaseTensors tensors(c), clean(c);
          if (first_score > 0) {
            const auto bump = [size = first_score](int64_t j) { return j == 0 ? size : 0.0; };
            bump_scores(c, tensors, bump);
            bump_scores(c, clean, bump);
          }
          harness::write_element(tensors.forward().v, bad, 0, key, 1, 5);
          tensors.accept_inputs();
          for (const Engine& engine : fast_engines()) {
            run(engine, c, tensors);
            run(engine, c, clean);
            for (int64_t i = 0; i < rows; ++i) {
              for (const int64_t d : {4, 5}) {
                const double got = harness::read_element(tensors.forward().out, 0, i, 1, d);
                if (i >= row && d == 5) {
                  EXPECT_FALSE(std::isfinite(got)) << "row " << i << reproduce(engine, c);
                } else {
                  EXPECT_NEAR(got, harness::read_element(clean.forward().out, 0, i, 1, d), 0.02)
                      << "row " << i << " column " << d << reproduce(engine, c);
                }
              }
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace fovea::test::scores
