// LatentAttention's options with their defaults filled in, and the checks of options and weights.
#pragma once

#include "layers/check_call.h"
#include "layers/check_options.h"

namespace fovea::layers {

struct LatentSizes {
  int64_t embed = 0, heads = 0;
  int64_t q_latent = 0, kv_latent = 0;
  int64_t nope = 0, rope = 0, v = 0;  // channels of a head
  bool deepseek = false;
  QkNorm qk_norm = QkNorm::kNone;

  int64_t qk() const { return nope + rope; }
};

// Refusals go to the check.
LatentSizes latent_sizes(const LatentOptions& options, const LayerShape& shape, OptionCheck& check);

// Whether calls of this shape work on the latents themselves.
bool is_absorbed(const LatentOptions& options, const LatentSizes& sizes, const LayerShape& shape);

void check_latent_weights(CallCheck& check, CallCheck::Weights kind, const LatentSizes& sizes,
                          const LatentWeights& weights);

}  // namespace fovea::layers
