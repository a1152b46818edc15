// The contract evaluated on samples, in either arithmetic.
#include "backend/reference/oracle.h"

#include <algorithm>

#include "backend/reference/head_rows.h"
#include "backend/reference/rows_io.h"

namespace fovea::reference {
namespace {

// The loaded keys of a problem together with their memory.
template <typename N>
class Evaluation {
 public:
  using Real = typename N::Real;

  Evaluation(const AttentionProblem& problem, const AttentionInputs& tensors)
      : problem_(problem),
        scratch_(HeadRows<N>::scratch_reals(problem, problem.kv_len)),
        out_(static_cast<size_t>(problem.dim_v)),
        dout_(static_cast<size_t>(problem.dim_v)),
        rows_(problem, tensors, problem.kv_len, scratch_.data()) {}

  HeadRows<N>& rows() { return rows_; }
  Real* out() { return out_.data(); }
  Real* dout() { return dout_.data(); }

  void load_dout(const BackwardTensors& t, QueryRow r) {
    load(t.dout, query_row(t.dout, rows_.sequence(), r.h, r.i), problem_.dim_v, dout());
  }

  // Statistics of a row, its delta included. Leaves dout(), and the row's weights where computed.
  RowStats<Real> stats(const BackwardTensors& t, QueryRow r, StatsFrom from) {
    const Sequence& sequence = rows_.sequence();
    load_dout(t, r);
    RowStats<Real> stats;
    if (from == StatsFrom::kComputed) {
      stats = rows_.softmax(r.h, r.i);
      rows_.output(out());
    } else {
      stats =
          HeadRows<N>::stats_of(load_one<double>(t.lse, lse_element(t.lse, sequence, r.h, r.i)));
      load(t.out, query_row(t.out, sequence, r.h, r.i), problem_.dim_v, out());
    }
    stats.delta = delta_of(t, sequence, r.h, r.i, problem_.dim_v, dout(), out());
    return stats;
  }

 private:
  const AttentionProblem& problem_;
  std::vector<Real> scratch_, out_, dout_;
  HeadRows<N> rows_;
};

template <typename Real>
void append(std::vector<double>& to, const Real* from, int64_t count) {
  for (int64_t d = 0; d < count; ++d) to.push_back(static_cast<double>(from[d]));
}

template <typename N>
ForwardSample forward_of(const AttentionProblem& p, const ForwardTensors& t,
                         const GroupSample& group) {
  ForwardSample sample;
  Evaluation<N> evaluation(p, t);
  evaluation.rows().select(group.b, group.head_kv);
  for (const QueryRow& r : group.rows) {
    const auto stats = evaluation.rows().softmax(r.h, r.i);
    evaluation.rows().output(evaluation.out());
    append(sample.out, evaluation.out(), p.dim_v);
    sample.lse.push_back(HeadRows<N>::lse_of(stats));
  }
  return sample;
}

// dk and dv at the sampled keys: each query head's sum is rounded before the heads are added, as
// after repeating the keys and values for every query head.
template <typename N>
void key_gradients(const AttentionProblem& p, const BackwardTensors& t, const GroupSample& group,
                   const std::vector<RowStats<typename N::Real>>& stats, Evaluation<N>& evaluation,
                   BackwardSample& sample) {
  using Real = typename N::Real;
  const auto keys = static_cast<int64_t>(group.keys.size());
  std::vector<Real> dk(group.keys.size() * static_cast<size_t>(p.dim_qk));
  std::vector<Real> dv(group.keys.size() * static_cast<size_t>(p.dim_v));
  std::vector<Real> sum_dk(dk.size()), sum_dv(dv.size());
  HeadRows<N>& rows = evaluation.rows();
  rows.select(group.b, group.head_kv, group.keys.data(), keys);
  const int64_t heads = p.head_q / p.head_kv;
  auto at = stats.begin();
  for (int64_t h = group.head_kv * heads; h < (group.head_kv + 1) * heads; ++h) {
    std::fill(dk.begin(), dk.end(), Real{0});
    std::fill(dv.begin(), dv.end(), Real{0});
    for (int64_t i = 0; i < rows.sequence().q_len; ++i, ++at) {
      evaluation.load_dout(t, {h, i});
      rows.softmax(h, i, *at);
      rows.differentiate(evaluation.dout(), at->delta);
      rows.add_dk(dk.data());
      rows.add_dv(evaluation.dout(), dv.data());
    }
    for (size_t n = 0; n < dk.size(); ++n) sum_dk[n] += N::round(dk[n]);
    for (size_t n = 0; n < dv.size(); ++n) sum_dv[n] += N::round(dv[n]);
  }
  for (const Real x : sum_dk) sample.dk.push_back(static_cast<double>(N::round(x)));
  for (const Real x : sum_dv) sample.dv.push_back(static_cast<double>(N::round(x)));
}

template <typename N>
BackwardSample backward_of(const AttentionProblem& p, const BackwardTensors& t,
                           const GroupSample& group, StatsFrom from) {
  using Real = typename N::Real;
  BackwardSample sample;
  Evaluation<N> evaluation(p, t);
  HeadRows<N>& rows = evaluation.rows();
  rows.select(group.b, group.head_kv);
  std::vector<Real> dq(static_cast<size_t>(p.dim_qk));
  for (const QueryRow& r : group.rows) {
    const auto stats = evaluation.stats(t, r, from);
    if (from == StatsFrom::kGiven) rows.softmax(r.h, r.i, stats);
    rows.differentiate(evaluation.dout(), stats.delta);
    rows.dq(dq.data());
    append(sample.dq, dq.data(), p.dim_qk);
  }
  if (group.keys.empty()) return sample;
  std::vector<RowStats<Real>> stats;
  const int64_t heads = p.head_q / p.head_kv;
  for (int64_t h = group.head_kv * heads; h < (group.head_kv + 1) * heads; ++h) {
    for (int64_t i = 0; i < rows.sequence().q_len; ++i) {
      stats.push_back(evaluation.stats(t, {h, i}, from));
    }
  }
  key_gradients(p, t, group, stats, evaluation, sample);
  return sample;
}

template <typename N>
void dbias_row(const AttentionProblem& p, const BackwardTensors& t, const BiasRow& row,
               StatsFrom from, Evaluation<N>& evaluation, typename N::Real* sum) {
  const auto& sizes = t.dbias.sizes;
  HeadRows<N>& rows = evaluation.rows();
  const int64_t heads = p.head_q / p.head_kv;
  for (int64_t b = row.b; b < (sizes[0] == 1 ? p.batch : row.b + 1); ++b) {
    int64_t loaded = -1;
    for (int64_t h = row.h; h < (sizes[1] == 1 ? p.head_q : row.h + 1); ++h) {
      if (h / heads != loaded) rows.select(b, loaded = h / heads);
      const int64_t q_len = rows.sequence().q_len;
      for (int64_t i = row.i; i < (sizes[2] == 1 ? q_len : std::min(row.i + 1, q_len)); ++i) {
        const auto stats = evaluation.stats(t, {h, i}, from);
        if (from == StatsFrom::kGiven) rows.softmax(h, i, stats);
        rows.differentiate(evaluation.dout(), stats.delta);
        rows.add_dbias(sum);
      }
    }
  }
}

template <typename N>
std::vector<double> dbias_of(const AttentionProblem& p, const BackwardTensors& t,
                             const std::vector<BiasRow>& bias_rows, StatsFrom from) {
  using Real = typename N::Real;
  std::vector<double> sample;
  Evaluation<N> evaluation(p, t);
  std::vector<Real> sum(static_cast<size_t>(p.kv_len));
  for (const BiasRow& row : bias_rows) {
    std::fill(sum.begin(), sum.end(), Real{0});
    dbias_row(p, t, row, from, evaluation, sum.data());
    for (const Real x : sum) {
      sample.push_back(static_cast<double>(t.dbias.dtype == p.dtype ? N::round(x) : x));
    }
  }
  return sample;
}

template <typename N>
double dsink_of(const AttentionProblem& p, const BackwardTensors& t, int64_t h, StatsFrom from) {
  Evaluation<N> evaluation(p, t);
  HeadRows<N>& rows = evaluation.rows();
  typename N::Real sum = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    rows.select(b, h / (p.head_q / p.head_kv));
    for (int64_t i = 0; i < rows.sequence().q_len; ++i) {
      const auto stats = evaluation.stats(t, {h, i}, from);
      const auto weight = rows.sink_weight(h, stats);
      if (weight != 0) sum -= weight * stats.delta;
    }
  }
  return static_cast<double>(sum);
}

}  // namespace

ForwardSample sample_forward(Arithmetic arithmetic, const AttentionProblem& problem,
                             const ForwardTensors& tensors, const GroupSample& group) {
  return with_numbers(arithmetic, problem,
                      [&](auto n) { return forward_of<decltype(n)>(problem, tensors, group); });
}

BackwardSample sample_backward(Arithmetic arithmetic, const AttentionProblem& problem,
                               const BackwardTensors& tensors, const GroupSample& group,
                               StatsFrom stats) {
  return with_numbers(arithmetic, problem, [&](auto n) {
    return backward_of<decltype(n)>(problem, tensors, group, stats);
  });
}

std::vector<double> sample_dbias(Arithmetic arithmetic, const AttentionProblem& problem,
                                 const BackwardTensors& tensors, const std::vector<BiasRow>& rows,
                                 StatsFrom stats) {
  return with_numbers(arithmetic, problem,
                      [&](auto n) { return dbias_of<decltype(n)>(problem, tensors, rows, stats); });
}

double sample_dsink(Arithmetic arithmetic, const AttentionProblem& problem,
                    const BackwardTensors& tensors, int64_t h, StatsFrom stats) {
  return with_numbers(arithmetic, problem,
                      [&](auto n) { return dsink_of<decltype(n)>(problem, tensors, h, stats); });
}

}  // namespace fovea::reference
