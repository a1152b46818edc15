// What to compute: one attention problem, and the tensors of one call. Shapes use the vocabulary
// batch, head_q, head_kv, q_len, kv_len, dim_qk, dim_v.
//
//   fovea::AttentionProblem problem{.batch = 2, .head_q = 32, .head_kv = 8, .q_len = 4096,
//                                   .kv_len = 4096, .dim_qk = 128, .dim_v = 128,
//                                   .dtype = fovea::DType::kBf16, .mask = fovea::Mask::causal()};
//   fovea::ForwardTensors tensors{.q = q, .k = k, .v = v, .out = out, .lse = lse};
//
// The score of query i and key j is  softcap(scale * q_i . k_j) + bias_ij - slope * |p - j|,  where
// p = i + kv_len - q_len is the query's position (aligned at the end), and -inf where j is not
// visible. out_i is the sum over keys of dropout(softmax(scores)_ij) * v_j. A row that sees no key
// gives zeros.
#pragma once

#include <cstdint>
#include <optional>

#include "fovea/status.h"
#include "fovea/tensor.h"

namespace fovea {

// Which keys a query may see by position: position p sees key j when  p - left <= j <= p + right,
// or when j < prefix (a prompt that everybody sees).
struct Mask {
  static constexpr int64_t kUnbounded = -1;

  int64_t left = kUnbounded;
  int64_t right = kUnbounded;
  int64_t prefix = 0;

  static constexpr Mask none() { return {}; }
  static constexpr Mask causal() { return {kUnbounded, 0, 0}; }
  static constexpr Mask window(int64_t left, int64_t right) { return {left, right, 0}; }
  constexpr Mask with_prefix(int64_t length) const { return {left, right, length}; }
  friend constexpr bool operator==(const Mask&, const Mask&) = default;
};

// Optional inputs that take part in a problem; combine with |. The tensors of a call must match.
enum class Feature : uint32_t {
  kNone = 0,
  kBias = 1,        // an additive bias
  kBoolMask = 2,    // a boolean mask, true = takes part
  kKeyLengths = 4,  // a key length per batch member (dense layout)
  kAlibi = 8,       // a slope per head, or per batch member and head
  kSink = 16,       // a logit per head that joins the softmax denominator and no value
};
constexpr Feature operator|(Feature a, Feature b) {
  return static_cast<Feature>(static_cast<uint32_t>(a) | static_cast<uint32_t>(b));
}
constexpr bool has(Feature set, Feature one) {
  return (static_cast<uint32_t>(set) & static_cast<uint32_t>(one)) != 0;
}

enum class Layout {
  kDense,   // q [batch, q_len, head_q, dim_qk]
  kPacked,  // variable length: q [total_q, head_q, dim_qk], sequences found by cu_seqlens
};

enum class Determinism { kAny, kRequired };  // kRequired: two runs give the same bits
enum class Tf32 { kForbidden, kAllowed };    // for f32 problems on tensor cores

struct AttentionProblem {
  int64_t batch = 0;
  int64_t head_q = 0;  // a multiple of head_kv; query head h reads KV head h / (head_q / head_kv)
  int64_t head_kv = 0;
  int64_t q_len = 0;   // packed layout: the longest sequence
  int64_t kv_len = 0;  // packed layout: the longest sequence
  int64_t dim_qk = 0;
  int64_t dim_v = 0;
  DType dtype = DType::kF32;  // of q, k, v, out and their gradients
  Mask mask;
  Feature features = Feature::kNone;
  Layout layout = Layout::kDense;
  int64_t total_q = 0;                // packed layout only: rows of q
  int64_t total_kv = 0;               // packed layout only: rows of k and v
  std::optional<double> scale;        // 1 / sqrt(dim_qk) when absent
  double softcap = 0;                 // c > 0: c * tanh(x / c); 0 is off
  double dropout = 0;                 // probability of dropping a weight, in [0, 1)
  std::optional<double> logit_bound;  // a hint: |scale * q . k| is believed to stay below it
  Determinism determinism = Determinism::kAny;
  Tf32 tf32 = Tf32::kForbidden;

  friend bool operator==(const AttentionProblem&, const AttentionProblem&) = default;
};

// The counter of the dropout generator: the same pair drops the same elements on every engine.
struct DropoutSeed {
  uint64_t seed = 0;
  uint64_t offset = 0;
};

// Inputs of both passes. q, k, v take any strides with the last one 1. In the packed layout the
// first two dimensions of q, k, v, out are one: [total, head, dim].
// Where f32 is written here and below, an f64 problem takes f64; a bias may be f32 in either.
struct AttentionInputs {
  TensorView q;             // [batch, q_len, head_q, dim_qk]
  TensorView k;             // [batch, kv_len, head_kv, dim_qk]
  TensorView v;             // [batch, kv_len, head_kv, dim_v]
  TensorView bias;          // [batch|1, head_q|1, q_len|1, kv_len], problem dtype or f32
  TensorView mask;          // [batch|1, head_q|1, q_len|1, kv_len] bool
  TensorView key_lengths;   // [batch] i32, each in 0..kv_len; stands in for kv_len in positions too
  TensorView alibi_slopes;  // [head_q] or [batch, head_q] f32
  TensorView sink;          // [head_q] f32
  TensorView cu_seqlens_q;  // [batch + 1] i32, packed layout: 0 ... total_q
  TensorView cu_seqlens_kv;  // [batch + 1] i32, packed layout: 0 ... total_kv
  DropoutSeed dropout;
};

struct ForwardTensors : AttentionInputs {
  TensorView out;  // [batch, q_len, head_q, dim_v]
  TensorView lse;  // optional: [batch, head_q, q_len] f32, packed [head_q, total_q]; natural log
};

struct BackwardTensors : AttentionInputs {
  TensorView out;    // of the forward pass, or merged from parts together with lse
  TensorView lse;    // of the forward pass
  TensorView dout;   // like out
  TensorView dlse;   // optional incoming gradient of lse, like lse
  TensorView dq;     // like q
  TensorView dk;     // like k
  TensorView dv;     // like v
  TensorView dbias;  // optional, like bias: reduced over its broadcast dimensions
  TensorView dsink;  // optional, like sink
};

// One part of an attention over a split set of keys: what forward gave for those keys alone.
struct PartialResult {
  TensorView out;  // [batch, q_len, head_q, dim_v]
  TensorView lse;  // [batch, head_q, q_len] f32
};

// Joins parts over disjoint keys into the result over all of them; the order does not matter beyond
// rounding. A row with lse = -inf (it saw nothing) adds nothing. out and lse may be one of the
// parts'. A sink must be counted in one part only. All tensors are on out's device; on a CUDA
// device the work is queued on the stream.
Status merge(const PartialResult* parts, int64_t count, const TensorView& out,
             const TensorView& lse, Stream stream = {});

}  // namespace fovea
