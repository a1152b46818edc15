// Layers on a GPU under the 2x rule: the reference is the same layer in float64 on the same,
// already rounded, values; the plain formula in the same dtype is the layer on the CPU.
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

// Every result of `got` against `want`: at most twice the error of `plain`, and an ulp of the
// largest element; gradients that cancel to nothing are held to the scale of the others.
void expect_within_twice(const std::vector<NamedTensor>& got, const std::vector<NamedTensor>& plain,
                         const std::vector<NamedTensor>& want);

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
LayerPlan<Weights> plan_layer(LayerSample<Weights, Options> sample, DType dtype, Device device) {
  sample.options.dtype = dtype;
  auto plan = make_layer(sample.options, sample.shape, device);
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

// Forward and backward in every dtype.
template <typename Weights, typename Options>
void expect_layer_accurate(const LayerSample<Weights, Options>& sample) {
  for (const DType dtype : kLayerTypes) {
    SCOPED_TRACE(dtype_name(dtype));
    TensorStore narrow(dtype), exact;
    const LayerValues<Weights> values(sample, narrow), exact_values(values, exact);
    auto got = trial_of(plan_layer(sample, dtype, Device::cuda(0)), values, narrow);
    LayerOnDevice<Weights>(got).run();
    auto plain = trial_of(plan_layer(sample, dtype, Device::cpu()), values, narrow);
    auto want = trial_of(plan_layer(sample, DType::kF64, Device::cpu()), exact_values, exact);
    plain.run();
    want.run();
    expect_within_twice(results_of(got), results_of(plain), results_of(want));
    if (testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace fovea::test
