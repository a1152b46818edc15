// Attention layers: projections, positions, norms and a KV cache around the attention operator,
// forward and backward, over weights that the caller owns.
//
//   fovea::GroupedQueryOptions options;
//   options.embed_dim = 512, options.num_heads = 8, options.num_kv_heads = 2;
//   options.causal = true, options.position = fovea::Position::kRope;
//   auto layer = fovea::make_layer(options, {.batch = 4, .q_len = 128}, fovea::Device::cpu());
//   if (!layer.ok()) return layer.status();
//   fovea::LayerForward<fovea::FusedWeights> call;
//   call.query = x, call.weights = {.qkv = w_qkv, .out = w_out}, call.out = y;
//   fovea::Status done = layer->forward(call, workspace);
//
// docs/layers.md says what each layer computes. layer_plan.h holds the calls and the plan.
#pragma once

#include <cstdint>
#include <optional>

#include "fovea/layer_plan.h"

namespace fovea {

enum class Position { kNone, kRope, kAlibi };

enum class RopeStyle {
  kHalf,         // channel i turns with channel i + n / 2, of n that turn
  kInterleaved,  // channel 2 i turns with channel 2 i + 1
};

struct RopeOptions {
  double base = 10000;  // pair i turns by position * base^(-2 i / n)
  RopeStyle style = RopeStyle::kHalf;
  double fraction = 1;  // of a head's channels, the first ones
};

enum class QkNorm { kNone, kRms, kLayer };  // of each head's q and k, after their position

// What the classic layers share. Order: project, position, qk_norm, cache, attention, project.
struct LayerOptions {
  int64_t embed_dim = 0;
  int64_t num_heads = 0;
  int64_t head_dim = 0;       // 0: embed_dim / num_heads
  DType dtype = DType::kF32;  // of inputs, outputs, weights and gradients: f32, bf16, f16, f64
  bool causal = false;
  int64_t sliding_window = 0;  // n > 0: keys up to n - 1 positions away, itself included
  double dropout = 0;          // of attention weights
  Position position = Position::kNone;
  RopeOptions rope;
  QkNorm qk_norm = QkNorm::kNone;
  double norm_eps = 1e-6;
  std::optional<double> softmax_scale;  // 1 / sqrt(head dim) when absent
  int64_t max_seq_len = 0;              // tokens that a cache has room for
  Tf32 tf32 = Tf32::kForbidden;         // in an f32 layer's projections and attention on a GPU
  Determinism determinism = Determinism::kAny;  // kRequired: two calls give the same bits
};

struct MultiHeadOptions : LayerOptions {
  int64_t kdim = 0;  // width of key; 0: embed_dim
  int64_t vdim = 0;  // width of value; 0: embed_dim
  bool bias = true;
};

struct GroupedQueryOptions : LayerOptions {
  int64_t num_kv_heads = 0;
  bool bias = true;
};

struct SelfAttentionOptions : LayerOptions {  // as many KV heads as query heads
  bool bias = true;
};

struct MultiQueryOptions : LayerOptions {  // one KV head
  bool bias = true;
};

// Scale and shift of qk_norm, shared by all heads; absent ones are 1 and 0.
struct QkNormWeights {
  TensorView q;       // [head_dim]
  TensorView q_bias;  // [head_dim], QkNorm::kLayer
  TensorView k;       // [head_dim]
  TensorView k_bias;  // [head_dim], QkNorm::kLayer
};

struct MultiHeadWeights {
  TensorView q;         // [num_heads * head_dim, embed_dim]
  TensorView k;         // [num_heads * head_dim, kdim]
  TensorView v;         // [num_heads * head_dim, vdim]
  TensorView out;       // [embed_dim, num_heads * head_dim]
  TensorView q_bias;    // [num_heads * head_dim], given with options.bias, as the others are
  TensorView k_bias;    // [num_heads * head_dim]
  TensorView v_bias;    // [num_heads * head_dim]
  TensorView out_bias;  // [embed_dim]
  QkNormWeights norm;
};

// Of SelfAttention, GroupedQueryAttention and MultiQueryAttention.
struct FusedWeights {
  TensorView qkv;       // [(num_heads + 2 * num_kv_heads) * head_dim, embed_dim]: q, k, v
  TensorView out;       // [embed_dim, num_heads * head_dim]
  TensorView qkv_bias;  // [(num_heads + 2 * num_kv_heads) * head_dim], given with options.bias
  TensorView out_bias;  // [embed_dim], given with options.bias
  QkNormWeights norm;
};

// Attention over keys and values that are made from a latent; the cache holds the latent alone.
enum class LatentForm {
  kSimple,    // q, k, v from latents; position and qk_norm on whole heads
  kDeepSeek,  // latents normalised; RoPE on channels of their own, which keys share
};
enum class LatentDecode {
  kAuto,      // whichever takes less work at the plan's q_len
  kExpanded,  // keys and values of all cached tokens are made in each call
  kAbsorbed,  // scores and sums on the latents themselves; not with rope or qk_norm on whole heads
};

struct LatentOptions : LayerOptions {
  LatentForm form = LatentForm::kSimple;
  int64_t q_latent = 0;   // 0: max(16, embed_dim / 8)
  int64_t kv_latent = 0;  // 0: max(16, embed_dim / 8)
  // kDeepSeek, in place of head_dim: position is kRope, and qk_norm kNone.
  int64_t nope_dim = 128;  // channels of a head that do not turn
  int64_t rope_dim = 64;   // channels of a head that turn
  int64_t v_dim = 128;
  LatentDecode decode = LatentDecode::kAuto;
};

// A head's q and k have n = nope_dim + rope_dim channels, its v v_dim; in the simple form head_dim
// of each, and no rope_dim.
struct LatentWeights {
  TensorView q_down;   // [q_latent, embed_dim]
  TensorView q_up;     // [num_heads * n, q_latent]
  TensorView kv_down;  // [kv_latent + rope_dim, embed_dim]: the latent, then the keys' turning part
  TensorView k_up;     // [num_heads * nope_dim, kv_latent]
  TensorView v_up;     // [num_heads * v_dim, kv_latent]
  TensorView out;      // [embed_dim, num_heads * v_dim]
  TensorView q_latent_norm;   // [q_latent], kDeepSeek; absent: 1
  TensorView kv_latent_norm;  // [kv_latent], kDeepSeek; absent: 1
  QkNormWeights norm;         // kSimple
};

// CCGQA: attention in a compressed space, q and k mixed along the sequence by short convolutions.
enum class CcgqaConv {
  kHeadsThenAll,       // each head's channels among themselves, then all of q's, all of k's
  kChannelsThenHeads,  // each channel by itself, then each head's channels among themselves
};
enum class CcgqaCoupling {
  kAllHeads,  // q gets half the mean of k's heads, k half the mean of q's
  kGroup,     // both get the mean of a query head and its KV head
};
enum class KeyTemperature {
  kShared,      // keys are scaled by one temperature
  kPerHead,     // by one of each KV head
  kPerHeadExp,  // by the exponential of one of each KV head
};

struct CcgqaOptions {
  int64_t embed_dim = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  DType dtype = DType::kF32;

  bool convs = true;
  CcgqaConv conv = CcgqaConv::kHeadsThenAll;
  int64_t conv_taps[2] = {3, 3};  // of the first and the second convolution
  bool conv_bias = false;
  bool qk_mean = true;
  CcgqaCoupling coupling = CcgqaCoupling::kAllHeads;
  bool qk_norm = true;
  bool sqrt_dim_norm = false;  // normalised heads are sqrt(head_dim) long, not 1
  KeyTemperature temperature = KeyTemperature::kShared;
  bool rope = true;
  RopeOptions rotary;
  bool value_shift = true;  // half of a token's values are those of the token before

  bool causal = true;
  int64_t sliding_window = 0;           // as in LayerOptions
  std::optional<double> softmax_scale;  // 1 / sqrt(head_dim) when absent, also with qk_norm
  double output_scale = 1;
  int64_t max_seq_len = 0;
  Tf32 tf32 = Tf32::kForbidden;                 // as in LayerOptions
  Determinism determinism = Determinism::kAny;  // as in LayerOptions

  // The two published definitions. hydra: heads of embed_dim / compression / num_heads channels.
  static CcgqaOptions hydra(int64_t embed_dim, int64_t num_heads, int64_t num_kv_heads,
                            int64_t compression = 4);
  static CcgqaOptions zaya(int64_t embed_dim, int64_t num_heads, int64_t num_kv_heads,
                           int64_t head_dim);
};

// L = num_heads * head_dim, KV = num_kv_heads * head_dim.
struct CcgqaWeights {
  TensorView qkv;  // [L + 2 KV, embed_dim]: q, k, values of this token, values of the one before
  TensorView out;  // [embed_dim, L]
  // CcgqaConv::kHeadsThenAll
  TensorView q_conv1;  // [L, head_dim, taps]; the last tap is the current token
  TensorView q_conv2;  // [L, L, taps]
  TensorView k_conv1;  // [KV, head_dim, taps]
  TensorView k_conv2;  // [KV, KV, taps]
  // CcgqaConv::kChannelsThenHeads
  TensorView channel_conv;       // [L + KV, 1, taps]
  TensorView head_conv;          // [L + KV, head_dim, taps]
  TensorView channel_conv_bias;  // [L + KV], with conv_bias
  TensorView head_conv_bias;     // [L + KV], with conv_bias

  TensorView temperature;  // [1], per head: [num_kv_heads]; with qk_norm
};

Result<LayerPlan<MultiHeadWeights>> make_layer(const MultiHeadOptions& options,
                                               const LayerShape& shape, Device device,
                                               const PlanOptions& plan = {});
Result<LayerPlan<FusedWeights>> make_layer(const GroupedQueryOptions& options,
                                           const LayerShape& shape, Device device,
                                           const PlanOptions& plan = {});
Result<LayerPlan<FusedWeights>> make_layer(const SelfAttentionOptions& options,
                                           const LayerShape& shape, Device device,
                                           const PlanOptions& plan = {});
Result<LayerPlan<FusedWeights>> make_layer(const MultiQueryOptions& options,
                                           const LayerShape& shape, Device device,
                                           const PlanOptions& plan = {});

Result<LayerPlan<LatentWeights>> make_layer(const LatentOptions& options, const LayerShape& shape,
                                            Device device, const PlanOptions& plan = {});
Result<LayerPlan<CcgqaWeights>> make_layer(const CcgqaOptions& options, const LayerShape& shape,
                                           Device device, const PlanOptions& plan = {});

}  // namespace fovea
