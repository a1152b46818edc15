// One layer with tensors of its own: run forward and backward, compare gradients with finite
// differences, decode in chunks.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <deque>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "fovea/fovea.h"

namespace fovea::test {

// A layer planned with it computes the plain formula in its dtype.
inline const PlanOptions kPlainFormula{.backend = "reference", .arithmetic = Arithmetic::kPlain};

// Elements of a contiguous tensor of any float type, as doubles.
double element(const TensorView& t, int64_t i);
void set_element(const TensorView& t, int64_t i, double x);

// Tensors that live as long as it does; views stay valid as more are made.
class TensorStore {
 public:
  static constexpr uint64_t kSeed = 7;
  explicit TensorStore(DType dtype = DType::kF64, uint64_t seed = kSeed)
      : dtype_(dtype), random_(seed) {}

  TensorView blank(std::initializer_list<int64_t> sizes);  // NaN in every element
  TensorView like(const TensorView& t);
  TensorView wave(std::initializer_list<int64_t> sizes, double a, double b,
                  double s);  // s sin(a i + b)
  TensorView normal(std::initializer_list<int64_t> sizes, double scale);
  TensorView bytes(DType dtype, std::initializer_list<int64_t> sizes);

 private:
  DType dtype_;
  std::mt19937_64 random_;
  struct alignas(kWorkspaceAlignment) Line {
    std::byte bytes[kWorkspaceAlignment];
  };
  std::deque<std::vector<Line>> memory_;
};

// Scratch filled with bytes that no result may depend on.
struct Scratch {
  explicit Scratch(size_t bytes);
  operator Workspace() const { return {data, bytes}; }
  operator Saved() const { return {data, bytes}; }
  std::vector<std::byte> memory;
  void* data = nullptr;
  size_t bytes = 0;
};

using Visitor = std::function<void(const char* name, TensorView&)>;
void visit(MultiHeadWeights& w, const Visitor& visitor);
void visit(FusedWeights& w, const Visitor& visitor);
void visit(LatentWeights& w, const Visitor& visitor);
void visit(CcgqaWeights& w, const Visitor& visitor);

double sum(const TensorView& t);
double sum_abs(const TensorView& t);
double largest(const TensorView& t);  // of the absolutes
double dot(const TensorView& a, const TensorView& b);
double largest_difference(const TensorView& a, const TensorView& b);
void expect_same_bits(const TensorView& a, const TensorView& b, const std::string& what);

// A layer in training: out and every gradient of loss = sum(out * g), g = cos(0.29 i + 0.07).
template <typename Weights>
struct Trial {
  LayerPlan<Weights> plan;
  TensorStore& store;
  LayerForward<Weights> call;
  LayerBackward<Weights> back;

  Trial(LayerPlan<Weights> made, TensorStore& with, const LayerInputs& inputs,
        const Weights& weights)
      : plan(std::move(made)), store(with) {
    static_cast<LayerInputs&>(call) = inputs;
    call.weights = weights;
    call.out = store.like(inputs.query);
    static_cast<LayerInputs&>(back) = inputs;
    back.weights = weights;
    back.dout = store.like(inputs.query);
    for (int64_t i = 0; i < back.dout.elements(); ++i) {
      set_element(back.dout, i, std::cos(0.29 * static_cast<double>(i) + 0.07));
    }
    back.dquery = store.like(inputs.query);
    if (inputs.key.given() && inputs.key.data != inputs.query.data) {
      back.dkey = store.like(inputs.key);
    }
    if (inputs.value.given() && inputs.value.data != inputs.query.data) {
      back.dvalue = store.like(inputs.value);
    }
    back.dweights = weights;
    visit(back.dweights, [&](const char*, TensorView& w) {
      if (w.given()) w = store.like(w);
    });
  }

  void infer() {
    const Scratch workspace(plan.workspace_bytes(Pass::kForward)), saved(plan.saved_bytes());
    const Status done = plan.forward(call, workspace, saved);
    EXPECT_TRUE(done.ok()) << done.message();
  }

  double loss() {
    infer();
    return dot(call.out, back.dout);
  }

  void run() {
    const Scratch workspace(plan.workspace_bytes(Pass::kForward)), saved(plan.saved_bytes());
    const Scratch backward(plan.workspace_bytes(Pass::kBackward));
    const Status forward = plan.forward(call, workspace, saved);
    ASSERT_TRUE(forward.ok()) << forward.message();
    const Status done = plan.backward(back, backward, saved);
    ASSERT_TRUE(done.ok()) << done.message();
  }

  // A plan whose results lend their memory, and that spends what it saved, needs no more, and gives
  // the same.
  void expect_same_if_lent(const Result<LayerPlan<Weights>>& made) {
    ASSERT_TRUE(made.ok()) << made.status().message();
    for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
      EXPECT_LE(made->workspace_bytes(pass), plan.workspace_bytes(pass));
    }
    EXPECT_EQ(made->saved_bytes(), plan.saved_bytes());
    Trial lent(*made, store, call, call.weights);
    lent.back.dout = back.dout;
    lent.run();
    run();
    expect_same_bits(lent.call.out, call.out, "out");
    expect_same_bits(lent.back.dquery, back.dquery, "dquery");
    if (back.dkey.given()) expect_same_bits(lent.back.dkey, back.dkey, "dkey");
    if (back.dvalue.given()) expect_same_bits(lent.back.dvalue, back.dvalue, "dvalue");
    std::vector<TensorView> gradients;
    visit(lent.back.dweights, [&](const char*, TensorView& w) { gradients.push_back(w); });
    size_t at = 0;
    visit(back.dweights, [&](const char* name, TensorView& w) {
      if (w.given()) expect_same_bits(gradients[at], w, name);
      ++at;
    });
  }

  // Along a random direction of each input and weight: the slope of the loss is gradient .
  // direction.
  void expect_gradients_match_finite_differences(double tolerance = 2e-8) {
    run();
    expect_slope("query", call.query, back.dquery, tolerance);
    if (back.dkey.given()) expect_slope("key", call.key, back.dkey, tolerance);
    if (back.dvalue.given()) expect_slope("value", call.value, back.dvalue, tolerance);
    std::vector<std::pair<std::string, TensorView>> weights;
    visit(call.weights, [&](const char* name, TensorView& w) { weights.emplace_back(name, w); });
    size_t at = 0;
    visit(back.dweights, [&](const char*, TensorView& dw) {
      const auto& [name, w] = weights[at++];
      if (w.given()) expect_slope(name, w, dw, tolerance);
    });
  }

 private:
  void expect_slope(const std::string& name, const TensorView& x, const TensorView& dx,
                    double tolerance) {
    constexpr double kStep = 1e-4;
    std::mt19937_64 random(11);
    std::normal_distribution<double> normal;
    const int64_t count = x.elements();
    std::vector<double> direction(static_cast<size_t>(count)), start(direction);
    double expected = 0;
    for (int64_t i = 0; i < count; ++i) {
      direction[static_cast<size_t>(i)] = normal(random) / std::sqrt(static_cast<double>(count));
      start[static_cast<size_t>(i)] = element(x, i);
      expected += direction[static_cast<size_t>(i)] * element(dx, i);
    }
    const auto loss_at = [&](double step) {
      for (int64_t i = 0; i < count; ++i) {
        const auto n = static_cast<size_t>(i);
        set_element(x, i, start[n] + step * direction[n]);
      }
      return loss();
    };
    // Fourth order: the error is far below the tolerance.
    const double near = loss_at(kStep) - loss_at(-kStep);
    const double far = loss_at(2 * kStep) - loss_at(-2 * kStep);
    loss_at(0);
    const double slope = (8 * near - far) / (12 * kStep);
    EXPECT_NEAR(slope, expected, tolerance * (1 + std::abs(expected))) << "gradient of " << name;
    EXPECT_TRUE(std::isfinite(expected)) << "gradient of " << name;
  }
};

// The call's query in chunks of the given sizes through a cache, into the call's out. `make` plans
// a call of q_len tokens with LayerUse::kCached; Space is the memory that it takes.
template <typename Space, typename Weights, typename Make>
void decode_with(const Make& make, const LayerForward<Weights>& whole,
                 const std::vector<int64_t>& chunks) {
  const int64_t batch = whole.query.sizes[0], width = whole.query.sizes[2];
  LayerCache cache;
  std::optional<Space> memory;
  int64_t done = 0;
  const auto part = [&](const TensorView& t, int64_t count) {
    TensorView view = t;
    view.data = static_cast<std::byte*>(t.data) + done * t.strides[1] * dtype_bytes(t.dtype);
    view.sizes = {batch, count, width, 0};
    return view;
  };
  for (const int64_t count : chunks) {
    Result<LayerPlan<Weights>> plan = make(count);
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    if (!plan.ok()) return;
    if (!memory) {
      memory.emplace(plan->cache_bytes());
      cache = plan->cache_in(memory->data);
    }
    LayerForward<Weights> call = whole;
    call.query = part(whole.query, count);
    call.out = part(whole.out, count);
    call.cache = &cache;
    const Space workspace(plan->workspace_bytes(Pass::kForward));
    const Status status = plan->forward(call, workspace);
    EXPECT_TRUE(status.ok()) << status.message();
    done += count;
    EXPECT_EQ(cache.length, done);
  }
}

// The same on the host; gives the outputs in one tensor.
template <typename Weights, typename Make>
TensorView decode(const Make& make, const LayerForward<Weights>& whole,
                  const std::vector<int64_t>& chunks, TensorStore& store) {
  LayerForward<Weights> call = whole;
  call.out = store.like(whole.query);
  decode_with<Scratch>(make, call, chunks);
  return call.out;
}

}  // namespace fovea::test
