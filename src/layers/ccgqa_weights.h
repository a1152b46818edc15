// CCGQA's options and weights: what is right, and which weight belongs to which convolution.
#pragma once

#include "layers/ccgqa_prologue.h"
#include "layers/check_call.h"

namespace fovea::layers {

Status check_ccgqa_options(const CcgqaOptions& options, const LayerShape& shape);

void check_ccgqa_weights(CallCheck& check, CallCheck::Weights kind, const CcgqaOptions& options,
                         const CcgqaWeights& weights);

// The two convolutions with these weights, or with gradients in their place.
void set_convs(const CcgqaOptions& options, const CcgqaWeights& weights, Conv& first, Conv& second);

}  // namespace fovea::layers
