// A whole layer, causal, as a line of text: what `fovea bench` measures besides the operator.
//
//   auto c = fovea::harness::parse_layer_case("layer=ccgqa e=512 hq=8 hkv=2 b=4 q=512 dtype=bf16");
//
// Keys, all optional but layer, e and q:
//   layer=mha|self|gqa|mqa|latent|ccgqa       preset=hydra|zaya, of ccgqa
//   b hq hkv q d e           sizes; b = 1, hq = 1, hkv = hq (mqa: 1), d = e / hq (ccgqa: e / 4 hq)
//   dtype=f32|f16|bf16|f64   pass=fwd|fwd+bwd|fwd,fwd+bwd   seed=N
//   position=rope|none       of the classic layers and latent; ccgqa has its own
//
// Layers have no biases but zaya's. latent is the simple form, its latents e / 8 wide.
#pragma once

#include <string>
#include <variant>

#include "fovea/layers.h"
#include "harness/case.h"

namespace fovea::harness {

enum class LayerKind { kMultiHead, kSelf, kGrouped, kMultiQuery, kLatent, kCcgqa };
enum class CcgqaPreset { kHydra, kZaya };

struct LayerCase {
  LayerKind kind = LayerKind::kSelf;
  CcgqaPreset preset = CcgqaPreset::kHydra;
  int64_t batch = 1;
  int64_t q_len = 0;
  int64_t embed_dim = 0;
  int64_t head_q = 1;
  int64_t head_kv = 0;
  int64_t head_dim = 0;
  DType dtype = DType::kF32;
  Position position = Position::kRope;
  bool forward = true;
  bool training = false;  // forward and backward in a row
  uint64_t seed = 1;

  friend bool operator==(const LayerCase&, const LayerCase&) = default;
};

Result<LayerCase> parse_layer_case(const std::string& text);
std::string format_case(const LayerCase& c);
const char* layer_name(const LayerCase& c);  // "ccgqa"

// A case of the operator, or of a layer where the text has the key layer.
using AnyCase = std::variant<Case, LayerCase>;
Result<AnyCase> parse_any_case(const std::string& text);
std::string format_case(const AnyCase& c);

}  // namespace fovea::harness
