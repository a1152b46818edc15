// The attention formula for one query row at a time, over the keys of one sequence and KV head: the
// contract's page in code. It needs memory for the keys and a few rows, never for a score matrix.
//
//   HeadRows<Exact> rows(problem, tensors, scratch);      // scratch_reals() of memory
//   rows.select(b, head_kv);                              // or some of its keys alone
//   RowStats stats = rows.softmax(h, i);                  // scores and weights of row i
//   rows.output(out);                                     // [dim_v]
//   rows.differentiate(dout, stats.delta);                // weights -> gradients of the scores
//
// A key that the row does not see contributes nothing, whatever its k and v hold. Nor does one
// whose weight is exactly zero, but for values that are not finite.
#pragma once

#include "backend/reference/numbers.h"
#include "backend/sequence.h"
#include "fovea/plan.h"

namespace fovea::reference {

// What the weights and gradients of a row need of the whole row. p_j = exp(s_j - max) / sum; a
// log-sum-exp known from elsewhere is {lse, 1}. sum = 0: the row sees nothing.
template <typename Real>
struct RowStats {
  Real max = 0;
  Real sum = 0;
  Real delta = 0;  // sum_d dout * out - dlse
};

template <typename N>
class HeadRows {
 public:
  using Real = typename N::Real;

  // Memory for up to `keys` keys at once, in Reals; the memory must be aligned for double.
  static size_t scratch_reals(const AttentionProblem& problem, int64_t keys);

  HeadRows(const AttentionProblem& problem, const AttentionInputs& tensors, int64_t max_keys,
           Real* scratch);

  // Loads the keys of one batch member and KV head: all of them, or those listed in rising order.
  void select(int64_t b, int64_t head_kv);
  void select(int64_t b, int64_t head_kv, const int64_t* keys, int64_t count);

  const Sequence& sequence() const { return sequence_; }
  int64_t keys() const { return keys_; }  // how many are loaded

  // Scores of query row i of head h and their softmax over the loaded keys and the sink.
  RowStats<Real> softmax(int64_t h, int64_t i);
  // The same weights from stats that are known already.
  void softmax(int64_t h, int64_t i, const RowStats<Real>& stats);
  // lse and its inverse: what a softmax of lse alone gives.
  static double lse_of(const RowStats<Real>& stats);
  static RowStats<Real> stats_of(double lse);

  // sum_j drop(p_j) v_j, after softmax.
  void output(Real* out) const;  // [dim_v]
  // ds_j = p_j (drop'(dout . v_j) - delta), after softmax.
  void differentiate(const Real* dout, Real delta);
  void dq(Real* out) const;                       // [dim_qk], after differentiate
  void add_dk(Real* dk) const;                    // [keys, dim_qk], after differentiate
  void add_dv(const Real* dout, Real* dv) const;  // [keys, dim_v], after softmax
  void add_dbias(Real* dbias) const;              // [kv_len], after differentiate
  Real sink_weight(int64_t h, const RowStats<Real>& stats) const;

 private:
  void score(int64_t h, int64_t i);
  void drop(int64_t h, int64_t i);
  bool visible(int64_t h, int64_t i, int64_t key, int64_t position) const;

  const AttentionProblem& problem_;
  const AttentionInputs& tensors_;
  Real scale_;
  Sequence sequence_;
  int64_t batch_ = 0;
  int64_t keys_ = 0;
  const int64_t* listed_ = nullptr;  // null: all keys, in order
  int64_t begin_ = 0, end_ = 0;      // loaded keys that the current row may see
  int64_t seen_count_ = 0;

  Real* k_;       // [keys, dim_qk]
  Real* k_t_;     // [dim_qk, keys]
  Real* v_;       // [keys, dim_v]
  Real* v_t_;     // [dim_v, keys]
  Real* q_;       // [dim_qk], the current row
  Real* scores_;  // [keys], as are all below
  Real* slope_;   // derivative of the softcap
  Real* p_;       // softmax weights
  Real* kept_;    // what dropout multiplies a weight with: 0 or 1 / (1 - dropout)
  Real* dp_;
  Real* ds_;       // gradient of the scores: of the bias
  Real* dx_;       // gradient of scale * q . k, times scale
  int64_t* seen_;  // loaded keys with a score above -inf
};

// Calls job with the number type of an arithmetic on a problem.
template <typename Job>
auto with_numbers(Arithmetic arithmetic, const AttentionProblem& p, const Job& job) {
  if (arithmetic == Arithmetic::kPlain) {
    if (takes_tf32(p)) return job(PlainTf32());
    if (p.dtype == DType::kF32) return job(PlainF32());
    if (p.dtype == DType::kBf16) return job(PlainBf16());
    if (p.dtype == DType::kF16) return job(PlainF16());
  }
  return job(Exact());
}

}  // namespace fovea::reference
