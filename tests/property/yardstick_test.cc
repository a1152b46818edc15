// How small an error the comparison with the oracle still sees. Known errors are planted into the
// results of a sound engine, each as small as it can be and still be called wrong; the test holds
// that size below the one that docs/numerics.md states.
#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <numeric>

#include "harness/comparison.h"
#include "support/engines.h"
#include "support/values.h"

namespace fovea::test {
namespace {

using harness::Case;
using harness::CaseTensors;

class Yardstick : public EngineTest, public testing::WithParamInterface<const char*> {};

// The size from which on an error is seen in every case below: what was found, and a quarter more.
struct Sizes {
  double out;       // of the row with the largest element, or of all rows, relative to itself
  double lse;       // of one lse
  double gradient;  // of one element, relative to the largest of its tensor
  double key;       // the weight of a key that one row leaves out, in out and in lse
};

Sizes stated_for(const AttentionProblem& p) {
  if (p.tf32 == Tf32::kAllowed) return {0.005, 0.01, 0.007, 7e-4};
  switch (p.dtype) {
    case DType::kBf16: return {0.16, 0.05, 0.14, 0.008};
    case DType::kF16: return {0.02, 0.05, 0.02, 0.002};
    default: return {3e-5, 5e-4, 3e-5, 1e-4};
  }
}

using Change = std::function<double(double)>;

// Replaces every element, in the order of values_of.
void change(const TensorView& t, const Change& to) {
  std::array<int64_t, 4> n{1, 1, 1, 1};
  for (int i = 0; i < t.rank; ++i) n[static_cast<size_t>(i)] = t.sizes[static_cast<size_t>(i)];
  for (int64_t a = 0; a < n[0]; ++a)
    for (int64_t b = 0; b < n[1]; ++b)
      for (int64_t c = 0; c < n[2]; ++c)
        for (int64_t d = 0; d < n[3]; ++d) {
          harness::write_element(t, to(harness::read_element(t, a, b, c, d)), a, b, c, d);
        }
}

void set_values(const TensorView& t, const std::vector<double>& values) {
  size_t n = 0;
  change(t, [&](double) { return values[n++]; });
}

// One element of a view, as a view.
TensorView element_of(TensorView t, std::array<int64_t, 4> at) {
  for (int i = 0; i < t.rank; ++i) {
    const int64_t index = at[static_cast<size_t>(i)];
    t = slice(t, i, index, index + 1);
  }
  return t;
}

// Row i of head h, batch member 0: [1, 1, 1, dim].
TensorView row_of(const TensorView& t, int64_t i, int64_t h) {
  return slice(slice(slice(t, 0, 0, 1), 1, i, i + 1), 2, h, h + 1);
}

double largest_of(const TensorView& t) {
  double most = 0;
  for (const double x : values_of(t)) most = std::max(most, std::abs(x));
  return most;
}

// The row of batch member 0 that holds the largest element of it.
TensorView largest_row(const TensorView& t) {
  TensorView best = row_of(t, 0, 0);
  for (int64_t i = 0; i < t.sizes[1]; ++i) {
    for (int64_t h = 0; h < t.sizes[2]; ++h) {
      const TensorView row = row_of(t, i, h);
      if (largest_of(row) > largest_of(best)) best = row;
    }
  }
  return best;
}

// The results of a case, what the oracle says of them, and errors that come and go.
class Planting {
 public:
  explicit Planting(const std::string& text)
      : case_(must_parse(text)), tensors_(case_), comparison_(case_, tensors_) {
    run(fast_engines().back(), case_, tensors_);  // the instruction set that every machine has
  }

  const AttentionProblem& problem() const { return case_.problem; }
  const ForwardTensors& forward() const { return tensors_.forward(); }
  const BackwardTensors& backward() const { return tensors_.backward(); }

  bool sound(Pass pass) {
    const auto found = pass == Pass::kForward ? comparison_.forward() : comparison_.backward();
    return std::all_of(found.begin(), found.end(), [](const auto& a) { return a.ok; });
  }

  // Whether the error that plant() puts into outputs of a pass is seen; they are as before
  // afterwards.
  bool sees(Pass pass, const std::vector<TensorView>& into, const std::function<void()>& plant) {
    std::vector<std::vector<double>> before;
    for (const TensorView& t : into) before.push_back(values_of(t));
    plant();
    const bool seen = !sound(pass);
    for (size_t n = 0; n < into.size(); ++n) set_values(into[n], before[n]);
    return seen;
  }

  // The smallest size at which a change is seen, to a fifth of itself; 2 where even 1 is not.
  double smallest(Pass pass, const TensorView& t, const std::function<Change(double)>& of_size) {
    int missed = -120, seen = 4;  // quarters of an exponent of 2
    while (seen - missed > 1) {
      const int middle = std::midpoint(missed, seen);
      const bool found = sees(pass, {t}, [&] { change(t, of_size(std::exp2(middle / 4.0))); });
      (found ? seen : missed) = middle;
    }
    return std::exp2(seen / 4.0);
  }

 private:
  Case case_;
  CaseTensors tensors_;
  harness::Comparison comparison_;
};

Change scaled(double size) {
  return [size](double x) { return x * (1 + size); };
}

std::function<Change(double)> offset_by(double unit) {
  return [unit](double size) { return [=](double x) { return x + size * unit; }; };
}

// What row i of head h gives each key where there is no mask.
std::vector<double> weights_of(const Planting& p, int64_t i, int64_t h, int64_t head_kv) {
  const std::vector<double> q = values_of(row_of(p.forward().q, i, h));
  const double scale = 1 / std::sqrt(static_cast<double>(p.problem().dim_qk));
  std::vector<double> weights;
  for (int64_t j = 0; j < p.problem().kv_len; ++j) {
    const std::vector<double> k = values_of(row_of(p.forward().k, j, head_kv));
    weights.push_back(std::exp(scale * std::inner_product(q.begin(), q.end(), k.begin(), 0.0)));
  }
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  for (double& w : weights) w /= sum;
  return weights;
}

// The largest weight of a key that row i of head h can leave out unseen.
double largest_unseen_key(Planting& p, int64_t i, int64_t h) {
  const int64_t head_kv = h / (p.problem().head_q / p.problem().head_kv);
  const std::vector<double> weights = weights_of(p, i, h, head_kv);
  const TensorView out = row_of(p.forward().out, i, h);
  const TensorView lse = element_of(p.forward().lse, {0, h, i});
  double most = 0;
  for (size_t j = 0; j < weights.size(); ++j) {
    const double w = weights[j];
    const std::vector<double> v =
        values_of(row_of(p.forward().v, static_cast<int64_t>(j), head_kv));
    const bool seen = p.sees(Pass::kForward, {out, lse}, [&] {
      size_t d = 0;
      change(out, [&](double x) { return (x - w * v[d++]) / (1 - w); });
      change(lse, [&](double x) { return x + std::log1p(-w); });
    });
    if (!seen) most = std::max(most, w);
  }
  return most;
}

bool sees_swapped_rows(Planting& p) {
  const TensorView one = row_of(p.forward().out, 5, 1), two = row_of(p.forward().out, 6, 1);
  return p.sees(Pass::kForward, {one, two}, [&] {
    const std::vector<double> kept = values_of(one);
    set_values(one, values_of(two));
    set_values(two, kept);
  });
}

TEST_P(Yardstick, SeesErrorsOfTheStatedSize) {
  for (const char* dtype : {"bf16", "f16", "f32", "f32 tf32"}) {
    const std::string text = std::string(GetParam()) + " pass=fwd,bwd dtype=" + dtype;
    Planting p(text);
    ASSERT_TRUE(p.sound(Pass::kForward) && p.sound(Pass::kBackward)) << text;
    const ForwardTensors& f = p.forward();
    const BackwardTensors& b = p.backward();
    const Sizes stated = stated_for(p.problem());
    // Found sizes are in the report that --gtest_output writes.
    const auto expect = [&](const std::string& what, double found, double size) {
      EXPECT_LE(found, size) << what << "; " << text;
      RecordProperty(std::string(dtype) + ", " + what, std::to_string(found));
    };
    expect("a row", p.smallest(Pass::kForward, largest_row(f.out), scaled), stated.out);
    expect("all rows", p.smallest(Pass::kForward, f.out, scaled), stated.out);
    expect("an lse", p.smallest(Pass::kForward, element_of(f.lse, {0, 1, 5}), offset_by(1)),
           stated.lse);
    for (const auto& [name, t] :
         {std::pair("dq", b.dq), std::pair("dk", b.dk), std::pair("dv", b.dv)}) {
      const TensorView one = element_of(t, {0, 3, 0, 2});
      expect(name, p.smallest(Pass::kBackward, one, offset_by(largest_of(t))), stated.gradient);
    }
    expect("a key", largest_unseen_key(p, 5, 1), stated.key);
    EXPECT_TRUE(sees_swapped_rows(p)) << text;
    EXPECT_TRUE(p.sound(Pass::kForward) && p.sound(Pass::kBackward))
        << "an error was left behind; " << text;
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, Yardstick,
                         testing::Values("b=2 hq=4 hkv=2 q=64 kv=96 d=64",
                                         "b=1 hq=2 q=300 kv=200 d=32",
                                         "b=1 hq=4 hkv=1 q=64 kv=128 d=64 data=spiky"));

}  // namespace
}  // namespace fovea::test
