// Outputs of a layer's case against the same layer in float64 on the CPU, on the same, already
// rounded, values. Of the first sequence the first tokens are compared, as many as are affordable:
// a causal layer gives them without the rest.
//
//   const int64_t sample = sample_tokens(c, cost_limit);   // 0: none can be afforded
//   LayerTensors tensors(c, sample);
//   LayerComparison comparison(c, tensors, sample);
//   std::vector<Accuracy> found = comparison.forward();    // of what tensors hold by now
#pragma once

#include <memory>

#include "harness/accuracy.h"
#include "harness/layer_tensors.h"

namespace fovea::harness {

// Tokens whose forward and backward take at most so many multiply-adds.
int64_t sample_tokens(const LayerCase& c, double cost_limit);

class LayerComparison {
 public:
  // The tensors must outlive it; `sample` is at least 1.
  LayerComparison(const LayerCase& c, const LayerTensors& tensors, int64_t sample);

  // Each runs the float64 layer the first time. An entry that holds a message is its failure.
  std::vector<Accuracy> forward();
  // Out and all gradients, which must come from sampled_dout.
  std::vector<Accuracy> training();

 private:
  Status run_exact();

  LayerCase exact_case_;
  const LayerTensors& tensors_;
  std::unique_ptr<LayerTensors> exact_;  // null: not run yet
};

}  // namespace fovea::harness
