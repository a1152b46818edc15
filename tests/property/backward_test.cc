// Properties of the backward pass that need no oracle.
#include <cmath>

#include "support/engines.h"
#include "support/values.h"

namespace fovea::test {
namespace {

using harness::Case;
using harness::CaseTensors;
using harness::read_element;

class BackwardProperty : public EveryEngine {};

const char* const kDTypes[] = {"bf16", "f16", "f32"};

// <a, b> over one KV head's group of query heads (per = heads of a per KV head).
double inner(const TensorView& a, const TensorView& b, int64_t batch, int64_t first,
             int64_t heads) {
  double sum = 0;
  for (int64_t s = 0; s < a.sizes[1]; ++s)
    for (int64_t h = first; h < first + heads; ++h)
      for (int64_t d = 0; d < a.sizes[3]; ++d) {
        sum += read_element(a, batch, s, h, d) * read_element(b, batch, s, h, d);
      }
  return sum;
}

double magnitude(const TensorView& a, const TensorView& b, int64_t batch, int64_t first,
                 int64_t heads) {
  double sum = 0;
  for (int64_t s = 0; s < a.sizes[1]; ++s)
    for (int64_t h = first; h < first + heads; ++h)
      for (int64_t d = 0; d < a.sizes[3]; ++d) {
        const double x = read_element(a, batch, s, h, d) * read_element(b, batch, s, h, d);
        sum += x * x;
      }
  return std::sqrt(sum);
}

// 15: sum_j dv_j = sum_i do_i, <v, dv> = <o, do>, <q, dq> = <k, dk>, per KV group.
TEST_P(BackwardProperty, SumsAgree) {
  const bool slow = GetParam().backend == "reference";
  for (const char* dtype : kDTypes) {
    const Case c = must_parse(std::string(slow ? "q=150 kv=200" : "q=1000 kv=1500") +
                              " b=1 hq=4 hkv=2 d=64 mask=causal pass=fwd,bwd dtype=" + dtype);
    CaseTensors t(c);
    run(GetParam(), c, t);
    const BackwardTensors& x = t.backward();
    // Rounding errors are independent, so sums of products drift by about the root of the squares.
    const double ulps = c.problem.dtype == DType::kF32 ? 1e-4 : 40 * tolerance_of(c.problem.dtype);
    for (int64_t head = 0; head < 2; ++head) {
      const double do_o = inner(x.out, x.dout, 0, 2 * head, 2);
      EXPECT_NEAR(
          inner(x.v, x.dv, 0, head, 1), do_o,
          ulps * (magnitude(x.v, x.dv, 0, head, 1) + magnitude(x.out, x.dout, 0, 2 * head, 2)))
          << reproduce(GetParam(), c);
      EXPECT_NEAR(inner(x.k, x.dk, 0, head, 1), inner(x.q, x.dq, 0, 2 * head, 2),
                  ulps * (magnitude(x.k, x.dk, 0, head, 1) + magnitude(x.q, x.dq, 0, 2 * head, 2)))
          << reproduce(GetParam(), c);
      for (int64_t d = 0; d < 64; ++d) {
        double dv = 0, dout = 0, squares = 0;
        for (int64_t j = 0; j < c.problem.kv_len; ++j) {
          const double one = read_element(x.dv, 0, j, head, d);
          dv += one;
          squares += one * one;
        }
        for (int64_t i = 0; i < c.problem.q_len; ++i) {
          for (int64_t h = 2 * head; h < 2 * head + 2; ++h) {
            const double one = read_element(x.dout, 0, i, h, d);
            dout += one;
            squares += one * one;
          }
        }
        ASSERT_NEAR(dv, dout, ulps * std::sqrt(squares)) << reproduce(GetParam(), c);
      }
    }
  }
}

// 16: no incoming gradient, no outgoing one: exact zeros.
TEST_P(BackwardProperty, ZeroGivesZero) {
  for (const char* dtype : kDTypes) {
    const Case c = must_parse(
        "b=2 hq=4 hkv=2 q=40 kv=75 d=32 mask=causal sink bias=bh dbias "
        "softcap=9 pass=fwd,bwd dtype=" +
        std::string(dtype));
    CaseTensors t(c);
    fill_values(t.backward().dout, 0);
    t.accept_inputs();
    run(GetParam(), c, t);
    const BackwardTensors& x = t.backward();
    for (const TensorView& view : {x.dq, x.dk, x.dv, x.dbias, x.dsink}) {
      for (const double value : values_of(view)) ASSERT_EQ(value, 0) << reproduce(GetParam(), c);
    }
  }
}

// 16: backward is linear in dout.
TEST_P(BackwardProperty, LinearInDout) {
  for (const char* dtype : kDTypes) {
    const Case c = must_parse(
        "b=2 hq=4 hkv=2 q=40 kv=75 d=32 mask=causal sink pass=fwd,bwd dtype=" + std::string(dtype));
    Case other_seed = c;
    other_seed.seed = 99;
    CaseTensors a(c), b(c), sum(c);
    copy_values(CaseTensors(other_seed).backward().dout, b.backward().dout);
    const TensorView& into = sum.backward().dout;
    for (int64_t batch = 0; batch < 2; ++batch)
      for (int64_t i = 0; i < 40; ++i)
        for (int64_t h = 0; h < 4; ++h)
          for (int64_t d = 0; d < 32; ++d) {
            // Eighths within +-5, so that a + 2 b is exact in every dtype.
            const auto coarse = [&](const TensorView& t) {
              return std::round(read_element(t, batch, i, h, d) * 8) / 8;
            };
            const double x = coarse(a.backward().dout), y = coarse(b.backward().dout);
            harness::write_element(a.backward().dout, x, batch, i, h, d);
            harness::write_element(b.backward().dout, y, batch, i, h, d);
            harness::write_element(into, x + 2 * y, batch, i, h, d);
          }
    for (CaseTensors* t : {&a, &b, &sum}) {
      t->accept_inputs();
      run(GetParam(), c, *t);
    }
    const BackwardTensors &x = a.backward(), &y = b.backward(), &z = sum.backward();
    for (const auto& [p, q, r] :
         {std::tuple(x.dq, y.dq, z.dq), std::tuple(x.dk, y.dk, z.dk), std::tuple(x.dv, y.dv, z.dv),
          std::tuple(x.dsink, y.dsink, z.dsink)}) {
      std::vector<double> expected = values_of(p);
      const std::vector<double> second = values_of(q);
      for (size_t i = 0; i < expected.size(); ++i) expected[i] += 2 * second[i];
      EXPECT_LE(relative_difference(values_of(r), expected), 2 * tolerance_of(c.problem.dtype))
          << reproduce(GetParam(), c);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, BackwardProperty, testing::ValuesIn(every_engine()), engine_name);

}  // namespace
}  // namespace fovea::test
