// Products of f32 layers err no more than float arithmetic does, whatever an instruction set makes
// them of, and hold every float.
#include <limits>

#include "backend/cpu/isa.h"
#include "layers/layer_trial.h"
#include "support/variable_scope.h"

namespace fovea::test {
namespace {

constexpr int64_t kWidth = 64;
// Of the absolute sum: FMA in any order stays below it here, floats cut into two bf16 would not.
constexpr double kError = 6 * 0x1p-24;

// Each token attends to itself alone, and its value is x: what is left is the projection of the
// output, and in the backward pass that of its gradient.
struct OneProjection {
  struct Size {
    int64_t tokens = 200, width = kWidth, heads = 1;
  };
  Size size;
  TensorStore store{DType::kF32};
  LayerInputs in;
  MultiHeadWeights w;

  explicit OneProjection(double scale = 1) : OneProjection(Size{}, scale) {}
  explicit OneProjection(Size s, double scale = 1) : size(s) {
    const int64_t width = size.width;
    in.query = store.normal({size.tokens, 1, width}, scale);
    for (TensorView* const t : {&w.q, &w.k, &w.v}) *t = store.normal({width, width}, 0);
    for (int64_t i = 0; i < width; ++i) set_element(w.v, i * width + i, 1);
    w.out = store.normal({width, width}, 1);
  }

  // On every instruction set.
  template <typename Check>
  void run(const Check& check) {
    MultiHeadOptions options;
    options.embed_dim = size.width;
    options.num_heads = size.heads;
    options.head_dim = size.width / size.heads;
    options.bias = false;
    options.dtype = DType::kF32;
    for (const std::string& isa : cpu_isas()) {
      SCOPED_TRACE(isa);
      const VariableScope scope("FOVEA_ISA", isa);
      const auto plan = make_layer(
          options, {.batch = size.tokens, .q_len = 1, .use = LayerUse::kTraining}, Device::cpu());
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      Trial<MultiHeadWeights> trial(*plan, store, in, w);
      trial.run();
      check(trial);
    }
  }
};

struct Sum {
  double value = 0, absolute = 0;
};
// Of a[i * a_step] b[i * b_step].
Sum products(const TensorView& a, int64_t a_first, int64_t a_step, const TensorView& b,
             int64_t b_first, int64_t b_step, int64_t count) {
  Sum sum;
  for (int64_t i = 0; i < count; ++i) {
    const double x = element(a, a_first + i * a_step) * element(b, b_first + i * b_step);
    sum.value += x;
    sum.absolute += std::abs(x);
  }
  return sum;
}

void expect_sum(double got, const Sum& want) {
  if (std::abs(want.value) <= std::numeric_limits<float>::max()) {
    EXPECT_LE(std::abs(got - want.value), kError * want.absolute + 0x1p-149);
  } else {
    EXPECT_EQ(got, static_cast<double>(static_cast<float>(want.value)));
  }
}

// Of every element, or with a larger step of some.
void expect_output(const OneProjection& p, const TensorView& out, int64_t step = 1) {
  const int64_t width = p.size.width;
  for (int64_t i = 0; i < p.size.tokens * width; i += step) {
    SCOPED_TRACE(i);
    expect_sum(element(out, i),
               products(p.in.query, i / width * width, 1, p.w.out, i % width * width, 1, width));
  }
}

void expect_input_gradient(const OneProjection& p, const TensorView& dout, const TensorView& dx,
                           int64_t step = 1) {
  const int64_t width = p.size.width;
  for (int64_t i = 0; i < p.size.tokens * width; i += step) {
    SCOPED_TRACE(i);
    expect_sum(element(dx, i),
               products(dout, i / width * width, 1, p.w.out, i % width, width, width));
  }
}

void expect_weight_gradient(const OneProjection& p, const TensorView& dout, const TensorView& dw,
                            int64_t step = 1) {
  const int64_t width = p.size.width;
  for (int64_t i = 0; i < width * width; i += step) {
    SCOPED_TRACE(i);
    expect_sum(element(dw, i),
               products(dout, i / width, width, p.in.query, i % width, width, p.size.tokens));
  }
}

void expect_errors_of_floats(OneProjection p, int64_t step) {
  p.run([&](const Trial<MultiHeadWeights>& trial) {
    expect_output(p, trial.call.out, step);
    expect_input_gradient(p, trial.back.dout, trial.back.dquery, step);
    expect_weight_gradient(p, trial.back.dout, trial.back.dweights.out, step);
  });
}

TEST(FloatProducts, ErrAsFloats) { expect_errors_of_floats(OneProjection(), 1); }

// Contractions and rows so long that they are cut, with something left over; the second width is
// one whose sums grow where they are wanted.
TEST(FloatProducts, LargeOnesErrAsFloats) {
  const VariableScope threads("FOVEA_NUM_THREADS", "2");
  for (const OneProjection::Size size :
       {OneProjection::Size{.tokens = 1045, .width = 520, .heads = 8},
        {.tokens = 1045, .width = 544, .heads = 17}}) {
    SCOPED_TRACE(size.width);
    expect_errors_of_floats(OneProjection(size), 61);
  }
}

TEST(FloatProducts, InfinitiesAndTheLargestFloats) {
  OneProjection p;
  set_element(p.w.out, 5 * kWidth + 7, std::numeric_limits<double>::infinity());
  set_element(p.w.out, 3 * kWidth + 2, std::numeric_limits<float>::max());
  p.run([&](const Trial<MultiHeadWeights>& trial) { expect_output(p, trial.call.out); });
}

// The gradient of keys is 0 here, and times a weight of any size adds nothing to that of x, which
// holds what came before. (That weight's x is small, so that keys are finite.)
TEST(FloatProducts, TheLargestFloatsInASumOfProducts) {
  OneProjection p;
  set_element(p.w.k, 2 * kWidth + 9, std::numeric_limits<float>::max());
  for (int64_t t = 0; t < p.size.tokens; ++t) set_element(p.in.query, t * kWidth + 9, 0.25);
  p.run([&](const Trial<MultiHeadWeights>& trial) {
    expect_input_gradient(p, trial.back.dout, trial.back.dquery);
  });
}

TEST(FloatProducts, SmallNumbers) {
  OneProjection p(1e-36);
  p.run([&](const Trial<MultiHeadWeights>& trial) { expect_output(p, trial.call.out); });
}

}  // namespace
}  // namespace fovea::test
