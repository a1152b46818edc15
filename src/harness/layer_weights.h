// The weights of a layer's case: what they are called, how large they are, how they are drawn.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "harness/layer_case.h"

namespace fovea::harness {

struct WeightShape {
  std::string name;  // of the member of the layer's Weights (fovea/layers.h)
  std::vector<int64_t> sizes;
  double deviation = 0;              // of values drawn from a normal distribution
  std::optional<double> constant{};  // the value of every element instead
};

std::vector<WeightShape> weight_shapes(const LayerCase& c);

// Multiply-adds by which weights meet one token, forward; the backward has twice as many. Attention
// itself is not among them.
double weight_macs(const LayerCase& c);

}  // namespace fovea::harness
