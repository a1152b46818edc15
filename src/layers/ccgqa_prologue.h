// The arguments of CCGQA's prologue: what lies between the projection of q, k, v and attention.
//
// Per token: two causal convolutions of q and k along the sequence, a coupling of q with k from
// before them, a norm per head, RoPE, and values half of which are the token's before.
//
// Rows of z begin `lead` rows before the first token: zeros, or what a cache kept. Both
// convolutions are then plain sums over rows that exist, and a token costs and gives the same in
// any chunk.
#pragma once

#include <array>
#include <cstddef>

#include "fovea/layers.h"
#include "layers/life.h"
#include "layers/row_positions.h"

namespace fovea::layers {

// One weight of a convolution: channels [first, first + channels), mixed in groups of `group`.
struct ConvBlock {
  int64_t first = 0;
  int64_t channels = 0;
  int64_t group = 1;
  TensorView weight;  // [channels, group, taps]; the last tap is the current token
  TensorView bias;    // [channels], or not given
};

struct Conv {
  int64_t taps = 1;
  int blocks = 0;
  std::array<ConvBlock, 2> block;
};

// What follows the convolutions in each token.
struct HeadMix {
  int64_t heads = 0, heads_kv = 0, dim = 0;
  bool couple = true;
  CcgqaCoupling coupling = CcgqaCoupling::kAllHeads;
  bool norm = true;
  double length = 1;        // of normalised k
  double query_length = 1;  // of normalised q, with what takes products to exponents of 2
  KeyTemperature kind = KeyTemperature::kShared;
  TensorView temperature;  // [1] or [heads_kv]
  RowPositions positions;
  bool value_shift = true;

  int64_t qk_width() const { return (heads + heads_kv) * dim; }
  int64_t v_width() const { return heads_kv * dim; }
};

// The steps of CCGQA's passes, by which memory is shared. Gradients of the convolutions' weights
// are there before the last step begins.
namespace ccgqa_forward {
enum Step { kProject, kPrologue, kAttend, kOutput };
}
namespace ccgqa_backward {
enum Step { kOutput, kAttend, kTokens, kAgain, kSecondWeights, kSecond, kFirst, kProject };
}

// Memory of the prologue's own, in the engine's order.
inline constexpr size_t kMostWork = 16;
using PrologueNeeds = std::array<Need, kMostWork>;
using PrologueWork = std::array<Scratch, kMostWork>;

struct Prologue {
  HeadMix mix;
  bool convolve = true;
  bool settled = false;  // weights were written before what was queued last
  // The rows of z before the first token stand for zeros, and are not there yet if the engine makes
  // them (LayerEngine::makes_lead).
  bool begins = false;
  Conv first, second;
  int64_t lead = 0;

  TensorView z;  // [batch, lead + q_len, qk_width + v_width]: q, k, v_now, v_before
  TensorView u;  // [batch, second.taps - 1 + q_len, qk_width]: after the first convolution
  bool makes_u_again = false;  // in backward, for it was not kept; dqk may lie over it
  bool keeps_u = true;         // for backward: forward alone may do without
  // Convolved and coupled, not yet normalised: [batch, q_len, qk_width]. An engine that keeps keys
  // (LayerEngine::keeps_keys) leaves [batch, q_len, v_width] of k alone, and of q's heads
  // [batch, q_len, heads] f32 one over what they were divided by; for no backward, neither.
  TensorView mixed, inverses;
  TensorView qk;  // [batch, q_len, qk_width]: the heads of q, then those of k
  TensorView v;   // [batch, q_len, v_width]

  PrologueWork work;
};

// Gradients of weights that are not given are not computed; nor is that of z's lead.
struct PrologueGradients {
  TensorView dqk;           // from attention; written over
  TensorView dv;            // from attention
  TensorView dmixed;        // [batch, second.taps - 1 + q_len + second.taps - 1, qk_width]
  TensorView du;            // [batch, second.taps - 1 + q_len + first.taps - 1, qk_width]
  TensorView dz;            // [batch, q_len, qk_width + v_width]
  TensorView dtemperature;  // like temperature
  Conv first, second;       // gradients in place of weights
};

}  // namespace fovea::layers
