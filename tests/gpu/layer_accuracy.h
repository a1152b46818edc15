// Layers on a GPU under the 2x rule. The reference is the same layer in float64 on the same,
// already rounded, values; the yardstick is the layer in plain arithmetic: every sum one running
// sum in order, every tensor between two steps rounded to the dtype, attention not fused.
#pragma once

#include <stdexcept>
#include <vector>

#include "layer_on_device.h"

namespace fovea::test {

// A layer and its call's values, made anew in any dtype.
template <typename Weights, typename Options>
struct LayerSample {
  Options options;
  LayerShape shape;
  std::function<Weights(TensorStore&)> weights;
  std::function<void(TensorStore&, LayerInputs&)> inputs;  // what there is besides query
};

inline constexpr DType kLayerTypes[] = {DType::kF32, DType::kF16, DType::kBf16};

struct NamedTensor {
  std::string name;
  TensorView view;
};

// What the results of a layer should be, and how far off those of the plain formula are.
class LayerYardstick {
 public:
  // Of the values that results will be held against.
  void set(const std::vector<NamedTensor>& plain, const std::vector<NamedTensor>& exact);
  // One error says little of another: a tensor of a few elements is held to the largest error that
  // the plain formula makes over several draws of the values.
  bool wants_more_draws() const;
  void add_draw(const std::vector<NamedTensor>& plain, const std::vector<NamedTensor>& exact);

  // Dense tensors in the order of the results; those at the end may be left out.
  void expect_within_twice(const std::vector<NamedTensor>& got) const;

 private:
  struct Errors {
    double largest = 0, rms = 0;
  };
  static Errors errors_of(const TensorView& got, const std::vector<double>& exact);

  struct Result {
    std::string name;
    std::vector<double> exact;
    Errors plain;
  };
  std::vector<Result> results_;
};

void convert(const TensorView& from, const TensorView& to);  // dense, same sizes

// The values of one sample in one dtype.
template <typename Weights>
struct LayerValues {
  LayerInputs in;
  Weights weights;

  template <typename Options>
  LayerValues(const LayerSample<Weights, Options>& sample, TensorStore& store) {
    const LayerShape& shape = sample.shape;
    in.query = store.normal({shape.batch, shape.q_len, sample.options.embed_dim}, 1);
    if (sample.inputs) sample.inputs(store, in);
    weights = sample.weights(store);
  }
  // The same in another store's dtype; masks and positions are shared.
  LayerValues(const LayerValues& from, TensorStore& store) : in(from.in), weights(from.weights) {
    const auto move = [&](TensorView& t) {
      if (!t.given()) return;
      const TensorView before = t;
      t = store.like(before);
      convert(before, t);
    };
    for (TensorView* t : {&in.query, &in.key, &in.value}) move(*t);
    visit(weights, [&](const char*, TensorView& w) { move(w); });
  }
};

template <typename Weights, typename Options>
LayerPlan<Weights> plan_layer(LayerSample<Weights, Options> sample, DType dtype, Device device,
                              const PlanOptions& options = {}) {
  sample.options.dtype = dtype;
  auto plan = make_layer(sample.options, sample.shape, device, options);
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  if (!plan.ok()) throw std::runtime_error(plan.status().message());
  return *plan;
}

template <typename Weights>
Trial<Weights> trial_of(LayerPlan<Weights> plan, const LayerValues<Weights>& values,
                        TensorStore& store) {
  Trial<Weights> trial(std::move(plan), store, values.in, values.weights);
  for (int64_t i = 0; i < trial.back.dout.elements(); ++i) {
    set_element(trial.back.dout, i, static_cast<double>(i % 5) - 1.5);  // exact in every type
  }
  return trial;
}

template <typename Weights>
std::vector<NamedTensor> results_of(Trial<Weights>& trial) {
  std::vector<NamedTensor> all{{"out", trial.call.out}};
  if (trial.plan.shape().use != LayerUse::kTraining) return all;
  all.push_back({"dquery", trial.back.dquery});
  if (trial.back.dkey.given()) all.push_back({"dkey", trial.back.dkey});
  if (trial.back.dvalue.given()) all.push_back({"dvalue", trial.back.dvalue});
  visit(trial.back.dweights, [&](const char* name, TensorView& w) {
    if (w.given()) all.push_back({std::string("d") + name, w});
  });
  return all;
}

// Of a sample whose values come from a new TensorStore(dtype).
template <typename Weights, typename Options>
LayerYardstick yardstick_of(const LayerSample<Weights, Options>& sample, DType dtype) {
  constexpr uint64_t kDraws = 8;
  LayerYardstick yardstick;
  for (uint64_t draw = 0; draw < kDraws; ++draw) {
    TensorStore narrow(dtype, TensorStore::kSeed + draw), exact;
    const LayerValues<Weights> values(sample, narrow), exact_values(values, exact);
    auto plain = trial_of(plan_layer(sample, dtype, Device::cpu(), kPlainFormula), values, narrow);
    auto want = trial_of(plan_layer(sample, DType::kF64, Device::cpu()), exact_values, exact);
    for (Trial<Weights>* trial : {&plain, &want}) {
      sample.shape.use == LayerUse::kTraining ? trial->run() : trial->infer();
    }
    if (draw > 0) {
      yardstick.add_draw(results_of(plain), results_of(want));
      continue;
    }
    yardstick.set(results_of(plain), results_of(want));
    if (!yardstick.wants_more_draws()) break;
  }
  return yardstick;
}

// Forward and backward in every dtype, with results that lend their memory and saved tensors that
// are spent, and with others.
template <typename Weights, typename Options>
void expect_layer_accurate(LayerSample<Weights, Options> sample) {
  for (const DType dtype : kLayerTypes) {
    SCOPED_TRACE(dtype_name(dtype));
    sample.shape.lends = sample.shape.spends = false;
    const LayerYardstick yardstick = yardstick_of(sample, dtype);
    for (const bool lends : {false, true}) {
      SCOPED_TRACE(lends ? "lends" : "does not lend");
      TensorStore store(dtype);
      const LayerValues<Weights> values(sample, store);
      sample.shape.lends = sample.shape.spends = lends;
      auto got = trial_of(plan_layer(sample, dtype, Device::cuda(0)), values, store);
      LayerOnDevice<Weights>(got).run();
      yardstick.expect_within_twice(results_of(got));
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

}  // namespace fovea::test
