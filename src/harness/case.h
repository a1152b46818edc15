// One attention problem with data as a line of text: what `fovea check`, `fovea bench` and every
// failing test speak of.
//
//   auto c = fovea::harness::parse_case("b=2 hq=32 hkv=8 q=4096 d=128 dtype=bf16 mask=causal");
//   if (!c.ok()) return c.status();                       // parse_case: dtype is bf17, must be ...
//   std::string text = fovea::harness::format_case(*c);   // parses back to the same case
//
// Keys, all optional but q and d:
//   b hq hkv q kv d dv       sizes; b = 1, hq = 1, hkv = hq, kv = q, dv = d when absent
//   dtype=f32|f16|bf16|f64   pass=fwd|bwd|fwd,bwd
//   mask=none|causal|window:LEFT:RIGHT (inf is unbounded)   prefix=N
//   bias[=full|letters]      an additive bias; letters of b, h, q name its broadcast dimensions
//   boolmask[=full|letters]  a boolean mask, likewise
//   bias_dtype=f32  alibi[=batch]  sink  softcap=C  dropout=P  scale=S  logit_bound=L
//   keylens[=N,N,...]        a key length per batch member; varlen: packed sequences, with
//   q_lens=N,N,... kv_lens=N,N,...; lengths that are not given are drawn from the seed
//   dbias  dlse              ask for the bias gradient, give a gradient of lse
//   order=bshd|bhsd  pad=N   memory order, and elements left unused after each row
//   data=normal|spiky|large_logits|constant|tiny|outlier_channels  seed=N  deterministic  tf32
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "fovea/attention.h"

namespace fovea::harness {

// Normal data alone hides errors: long softmax rows average them away.
enum class DataFamily {
  kNormal,
  kSpiky,            // one key dominates
  kLargeLogits,      // scores of about +-1e3
  kConstant,         // every element of a tensor the same
  kTiny,             // scores that all but vanish
  kOutlierChannels,  // a few channels far larger than the rest
};

enum class TensorOrder { kBshd, kBhsd };

struct Case {
  AttentionProblem problem;
  bool forward = true;
  bool backward = false;
  DataFamily data = DataFamily::kNormal;
  uint64_t seed = 1;
  TensorOrder order = TensorOrder::kBhsd;
  std::array<bool, 3> bias_broadcast{};  // batch, head, q
  std::array<bool, 3> mask_broadcast{};
  bool want_dbias = false;
  bool want_dlse = false;
  bool alibi_per_batch = false;
  bool bias_f32 = false;         // the bias is f32 whatever the problem's dtype
  int64_t pad = 0;               // unused elements after each row of q, k, v, out and gradients
  std::vector<int32_t> q_lens;   // packed sequences; drawn from the seed when empty
  std::vector<int32_t> kv_lens;  // packed sequences, or key lengths

  friend bool operator==(const Case&, const Case&) = default;
};

Result<Case> parse_case(const std::string& text);
std::string format_case(const Case& c);

// The lengths a case means: its own, or those drawn from the seed (one of them the longest).
struct CaseLengths {
  std::vector<int32_t> q;
  std::vector<int32_t> kv;
};
CaseLengths lengths_of(const Case& c);

// Sets total_q and total_kv of a packed problem from its lengths. parse_case has done so; a case
// built by hand calls it once its sizes, lengths and seed are final.
void set_totals(Case& c);

}  // namespace fovea::harness
