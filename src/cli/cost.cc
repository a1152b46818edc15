// Operations and bytes of a problem.
#include "cli/cost.h"

#include <algorithm>

#include "backend/sequence.h"

namespace fovea::cli {
namespace {

double bytes_of(const TensorView& t) {
  if (!t.given()) return 0;
  return static_cast<double>(t.elements()) * static_cast<double>(dtype_bytes(t.dtype));
}

double input_bytes(const AttentionInputs& t) {
  double bytes = 0;
  for (const TensorView& view : {t.q, t.k, t.v, t.bias, t.mask, t.key_lengths, t.alibi_slopes,
                                 t.sink, t.cu_seqlens_q, t.cu_seqlens_kv}) {
    bytes += bytes_of(view);
  }
  return bytes;
}

}  // namespace

double visible_pairs(const AttentionProblem& problem, const AttentionInputs& inputs) {
  int64_t pairs = 0;
  for (int64_t b = 0; b < problem.batch; ++b) {
    const Sequence s = sequence_at(problem, inputs, b);
    for (int64_t i = 0; i < s.q_len; ++i) {
      const KeyRange window = window_keys(problem.mask, i + s.kv_len - s.q_len, s.kv_len);
      const int64_t prefix = std::min(problem.mask.prefix, s.kv_len);
      const int64_t overlap =
          std::max<int64_t>(0, std::min(window.end, prefix) - std::min(window.begin, prefix));
      pairs += window.end - window.begin + prefix - overlap;
    }
  }
  return static_cast<double>(pairs) * static_cast<double>(problem.head_q);
}

double flops(const AttentionProblem& problem, double pairs, Pass pass) {
  const double forward = 2 * pairs * static_cast<double>(problem.dim_qk + problem.dim_v);
  return pass == Pass::kForward ? forward : 2.5 * forward;
}

double minimal_bytes(const ForwardTensors& t) {
  return input_bytes(t) + bytes_of(t.out) + bytes_of(t.lse);
}

double minimal_bytes(const BackwardTensors& t) {
  double bytes = input_bytes(t);
  for (const TensorView& view : {t.out, t.lse, t.dout, t.dlse, t.dq, t.dk, t.dv, t.dbias, t.dsink})
    bytes += bytes_of(view);
  return bytes;
}

}  // namespace fovea::cli
