// The arguments of a layer's projections, and of attention where one follows in the same step.
#pragma once

#include "fovea/tensor.h"

namespace fovea::layers {

// A chain of launches so short that what lies between them counts. The weight of a product that
// goes on with it was there when it began.
enum class Chain { kNone, kBegins, kGoesOn };

// A weight [out, in] with what goes with it: y = scale * x weight^T + bias.
struct Projection {
  TensorView weight;
  TensorView bias{};  // [out], or not given
  double scale = 1;
  double share = 1;  // of the device, that the product may count on
  Chain chain = Chain::kNone;
};

// Attention and the projection of its output as one step: causal, of as many keys as queries, with
// products of q and k that are exponents of 2.
struct AttendedOutput {
  TensorView q, k, v;  // [batch, rows, heads, dim]
  TensorView heads;    // attention's output, like q; not given: not kept
  TensorView lse;      // [batch, heads, rows] f32; likewise
  Projection project;
  TensorView out;          // [batch, rows, out]
  double logit_bound = 0;  // of a problem: a belief, not a promise
};

}  // namespace fovea::layers
