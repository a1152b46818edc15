// The attention formula, one query row at a time. N::round marks where an unfused framework would
// write a tensor in the problem's dtype, N::factor where a matrix product would take one; for the
// oracle both are the identity.
#include "backend/reference/head_rows.h"

#include <cmath>
#include <limits>

#include "base/philox.h"

namespace fovea::reference {
namespace {

constexpr int64_t kStrip = 512;  // keys whose running sums stay in the first-level cache

// sums[n] = sum_d x[d] * m_t[d][n] for begin <= n < end. Written as sums of rows, not as dot
// products, so that a compiler may use vectors without reordering a sum: the terms are added one by
// one, as a plain matrix product does.
template <typename N, typename Real = typename N::Real>
void dot_columns(const Real* x, int64_t dim, const Real* m_t, int64_t stride, int64_t begin,
                 int64_t end, Real* __restrict sums) {
  for (int64_t first = begin; first < end; first += kStrip) {
    const int64_t last = std::min(end, first + kStrip);
    for (int64_t n = first; n < last; ++n) sums[n] = 0;
    int64_t d = 0;
    for (; d + 4 <= dim; d += 4) {
      const Real *m0 = m_t + d * stride, *m1 = m0 + stride, *m2 = m1 + stride, *m3 = m2 + stride;
      const Real x0 = N::factor(x[d]), x1 = N::factor(x[d + 1]), x2 = N::factor(x[d + 2]),
                 x3 = N::factor(x[d + 3]);
      for (int64_t n = first; n < last; ++n) {
        sums[n] = (((sums[n] + x0 * m0[n]) + x1 * m1[n]) + x2 * m2[n]) + x3 * m3[n];
      }
    }
    for (; d < dim; ++d) {
      const Real* m0 = m_t + d * stride;
      for (int64_t n = first; n < last; ++n) sums[n] += N::factor(x[d]) * m0[n];
    }
  }
}

// out[d] = sum over the listed rows n with weight(n) != 0 of weight(n) * m[n][d].
template <typename Real, typename Weight>
void sum_rows(const int64_t* listed, int64_t count, const Weight& weight, const Real* m,
              int64_t dim, Real* __restrict out) {
  for (int64_t d = 0; d < dim; ++d) out[d] = 0;
  Real w[4];
  const Real* row[4];
  int held = 0;
  for (int64_t at = 0; at < count; ++at) {
    const int64_t n = listed[at];
    w[held] = weight(n);
    if (w[held] == 0) continue;
    row[held] = m + n * dim;
    if (++held < 4) continue;
    held = 0;
    const Real w0 = w[0], w1 = w[1], w2 = w[2], w3 = w[3];
    const Real *r0 = row[0], *r1 = row[1], *r2 = row[2], *r3 = row[3];
    for (int64_t d = 0; d < dim; ++d) {
      out[d] = (((out[d] + w0 * r0[d]) + w1 * r1[d]) + w2 * r2[d]) + w3 * r3[d];
    }
  }
  for (int at = 0; at < held; ++at) {
    for (int64_t d = 0; d < dim; ++d) out[d] += w[at] * row[at][d];
  }
}

template <typename N, typename Real = typename N::Real>
void add_scaled(Real weight, const Real* x, int64_t dim, Real* __restrict out) {
  weight = N::factor(weight);
  for (int64_t d = 0; d < dim; ++d) out[d] += weight * N::factor(x[d]);
}

// Where (b, h, i, 0) of a [batch|1, head_q|1, q_len|1, kv_len] tensor lies.
int64_t broadcast_row(const TensorView& t, int64_t b, int64_t h, int64_t i) {
  return (t.sizes[0] == 1 ? 0 : b * t.strides[0]) + (t.sizes[1] == 1 ? 0 : h * t.strides[1]) +
         (t.sizes[2] == 1 ? 0 : i * t.strides[2]);
}

}  // namespace

template <typename N>
size_t HeadRows<N>::scratch_reals(const AttentionProblem& problem, int64_t keys) {
  constexpr int64_t kRowsOfKeys = 7;
  constexpr int64_t kIndexReals = sizeof(int64_t) / sizeof(Real);
  return static_cast<size_t>(keys * (2 * problem.dim_qk + 2 * problem.dim_v + kRowsOfKeys) +
                             problem.dim_qk + (keys + 1) * kIndexReals);
}

template <typename N>
HeadRows<N>::HeadRows(const AttentionProblem& problem, const AttentionInputs& tensors,
                      int64_t max_keys, Real* scratch)
    : problem_(problem), tensors_(tensors), scale_(static_cast<Real>(scale_of(problem))) {
  seen_ = reinterpret_cast<int64_t*>(scratch);  // first: it asks the most alignment
  Real* next = scratch + max_keys * static_cast<int64_t>(sizeof(int64_t) / sizeof(Real));
  const auto take = [&next](int64_t count) {
    Real* at = next;
    next += count;
    return at;
  };
  k_ = take(max_keys * problem.dim_qk);
  k_t_ = take(max_keys * problem.dim_qk);
  v_ = take(max_keys * problem.dim_v);
  v_t_ = take(max_keys * problem.dim_v);
  q_ = take(problem.dim_qk);
  for (Real** row : {&scores_, &slope_, &p_, &kept_, &dp_, &ds_, &dx_}) *row = take(max_keys);
}

template <typename N>
void HeadRows<N>::select(int64_t b, int64_t head_kv) {
  select(b, head_kv, nullptr, sequence_at(problem_, tensors_, b).kv_len);
}

template <typename N>
void HeadRows<N>::select(int64_t b, int64_t head_kv, const int64_t* keys, int64_t count) {
  sequence_ = sequence_at(problem_, tensors_, b);
  batch_ = b;
  listed_ = keys;
  keys_ = count;
  const auto copy = [&](const TensorView& t, int64_t dim, Real* rows, Real* columns) {
    const RowStrides strides = row_strides(t);
    for (int64_t n = 0; n < count; ++n) {
      const int64_t key = keys == nullptr ? n : keys[n];
      load(t,
           sequence_.batch_at * strides.batch + (sequence_.kv_row + key) * strides.row +
               head_kv * strides.head,
           dim, rows + n * dim);
      for (int64_t d = 0; d < dim; ++d) rows[n * dim + d] = N::factor(rows[n * dim + d]);
    }
    constexpr int64_t kTile = 16;  // rows whose cache lines a transposition holds at once
    for (int64_t first = 0; first < count; first += kTile) {
      const int64_t last = std::min(count, first + kTile);
      for (int64_t d = 0; d < dim; ++d) {
        for (int64_t n = first; n < last; ++n) columns[d * count + n] = rows[n * dim + d];
      }
    }
  };
  copy(tensors_.k, problem_.dim_qk, k_, k_t_);
  copy(tensors_.v, problem_.dim_v, v_, v_t_);
}

template <typename N>
bool HeadRows<N>::visible(int64_t h, int64_t i, int64_t key, int64_t position) const {
  if (key >= sequence_.kv_len || !position_sees(problem_.mask, position, key)) return false;
  if (!has(problem_.features, Feature::kBoolMask)) return true;
  const TensorView& mask = tensors_.mask;
  const int64_t at = broadcast_row(mask, batch_, h, i) + key * mask.strides[3];
  return static_cast<const uint8_t*>(mask.data)[at] != 0;
}

// s_ij = softcap(scale * q_i . k_j) + bias_ij - slope_h * |position - j|; seen_ lists the keys that
// the masks leave and whose score is above -inf.
template <typename N>
void HeadRows<N>::score(int64_t h, int64_t i) {
  const int64_t position = i + sequence_.kv_len - sequence_.q_len;
  begin_ = 0;
  end_ = keys_;
  if (listed_ == nullptr) {
    const KeyRange window = window_keys(problem_.mask, position, sequence_.kv_len);
    const int64_t prefix = std::min(problem_.mask.prefix, sequence_.kv_len);
    begin_ = prefix > 0 ? 0 : std::min(window.begin, keys_);
    end_ = std::max({begin_, std::min(window.end, keys_), prefix});
  }
  const RowStrides strides = row_strides(tensors_.q);
  load(tensors_.q,
       sequence_.batch_at * strides.batch + (sequence_.q_row + i) * strides.row + h * strides.head,
       problem_.dim_qk, q_);
  dot_columns<N>(q_, problem_.dim_qk, k_t_, keys_, begin_, end_, scores_);

  const bool biased = has(problem_.features, Feature::kBias);
  const int64_t bias_row = biased ? broadcast_row(tensors_.bias, batch_, h, i) : 0;
  Real alibi = 0;
  if (has(problem_.features, Feature::kAlibi)) {
    const TensorView& slopes = tensors_.alibi_slopes;
    alibi =
        load_one<Real>(slopes, slopes.rank == 2 ? batch_ * slopes.strides[0] + h * slopes.strides[1]
                                                : h * slopes.strides[0]);
  }
  const auto cap = static_cast<Real>(problem_.softcap);
  seen_count_ = 0;
  for (int64_t n = begin_; n < end_; ++n) {
    const int64_t key = listed_ == nullptr ? n : listed_[n];
    Real x = N::round(N::round(scores_[n]) * scale_);
    slope_[n] = 1;
    if (cap > 0) {
      const Real t = std::tanh(x / cap);
      x = N::round(cap * t);
      slope_[n] = N::round(1 - t * t);
    }
    if (biased) {
      x = N::round(x + load_one<Real>(tensors_.bias, bias_row + key * tensors_.bias.strides[3]));
    }
    if (alibi != 0) {
      x = N::round(x - N::round(alibi * static_cast<Real>(std::abs(position - key))));
    }
    scores_[n] = x;
    const bool hidden =
        !visible(h, i, key, position) || x == -std::numeric_limits<Real>::infinity();
    if (!hidden) seen_[seen_count_++] = n;
  }
}

template <typename N>
RowStats<typename N::Real> HeadRows<N>::softmax(int64_t h, int64_t i) {
  score(h, i);
  constexpr Real kNone = -std::numeric_limits<Real>::infinity();
  const bool sink = has(problem_.features, Feature::kSink);
  const Real sink_score =
      sink ? load_one<Real>(tensors_.sink, h * tensors_.sink.strides[0]) : kNone;
  RowStats<Real> stats{sink_score, 0, 0};
  for (int64_t at = 0; at < seen_count_; ++at) {
    stats.max = std::max(stats.max, scores_[seen_[at]]);
  }
  // A row that sees nothing: no weights. (A NaN among the scores still makes the sum below NaN.)
  if (seen_count_ == 0 && stats.max == kNone) return stats;
  if (sink) stats.sum = std::exp(sink_score - stats.max);
  for (int64_t at = 0; at < seen_count_; ++at) {
    const int64_t n = seen_[at];
    p_[n] = std::exp(scores_[n] - stats.max);
    stats.sum += p_[n];
  }
  for (int64_t at = 0; at < seen_count_; ++at) {
    const int64_t n = seen_[at];
    p_[n] = N::round(p_[n] / stats.sum);
  }
  drop(h, i);
  return stats;
}

template <typename N>
void HeadRows<N>::softmax(int64_t h, int64_t i, const RowStats<Real>& stats) {
  score(h, i);
  if (stats.sum == 0) seen_count_ = 0;
  for (int64_t at = 0; at < seen_count_; ++at) {
    const int64_t n = seen_[at];
    p_[n] = N::round(std::exp(scores_[n] - stats.max) / stats.sum);
  }
  drop(h, i);
}

template <typename N>
double HeadRows<N>::lse_of(const RowStats<Real>& stats) {
  if (stats.sum == 0) return -std::numeric_limits<double>::infinity();
  return static_cast<double>(stats.max + std::log(stats.sum));
}

template <typename N>
RowStats<typename N::Real> HeadRows<N>::stats_of(double lse) {
  const bool nothing = lse == -std::numeric_limits<double>::infinity();
  return {static_cast<Real>(lse), nothing ? Real{0} : Real{1}, 0};
}

template <typename N>
void HeadRows<N>::drop(int64_t h, int64_t i) {
  if (problem_.dropout <= 0) {
    for (int64_t n = begin_; n < end_; ++n) kept_[n] = 1;
    return;
  }
  const uint32_t threshold = dropout_threshold(problem_.dropout);
  const auto kept = static_cast<Real>(1 / (1 - problem_.dropout));
  const DropoutSeed& seed = tensors_.dropout;
  for (int64_t n = begin_; n < end_; ++n) {
    const int64_t key = listed_ == nullptr ? n : listed_[n];
    const uint32_t word =
        dropout_word(seed.seed, seed.offset, batch_ * problem_.head_q + h, i, key);
    kept_[n] = word >= threshold ? kept : 0;
  }
}

template <typename N>
void HeadRows<N>::output(Real* out) const {
  const auto weight = [this](int64_t n) { return N::factor(N::round(p_[n] * kept_[n])); };
  sum_rows(seen_, seen_count_, weight, v_, problem_.dim_v, out);
  // No weight is so small that Inf or NaN would not show.
  for (int64_t at = 0; at < seen_count_; ++at) {
    if (weight(seen_[at]) != 0) continue;
    const Real* const v = v_ + seen_[at] * problem_.dim_v;
    for (int64_t d = 0; d < problem_.dim_v; ++d) {
      if (!std::isfinite(v[d])) out[d] += v[d];
    }
  }
  for (int64_t d = 0; d < problem_.dim_v; ++d) out[d] = N::round(out[d]);
}

template <typename N>
void HeadRows<N>::differentiate(const Real* dout, Real delta) {
  dot_columns<N>(dout, problem_.dim_v, v_t_, keys_, begin_, end_, dp_);
  for (int64_t at = 0; at < seen_count_; ++at) {
    const int64_t n = seen_[at];
    // A dropped weight takes no gradient from its value: 0, even where the value is NaN.
    const Real dp = kept_[n] == 0 ? 0 : N::round(N::round(dp_[n]) * kept_[n]);
    ds_[n] = p_[n] == 0 ? 0 : N::round(p_[n] * (dp - delta));
    dx_[n] = ds_[n] == 0 ? 0 : N::round(N::round(ds_[n] * slope_[n]) * scale_);
  }
}

template <typename N>
void HeadRows<N>::dq(Real* out) const {
  sum_rows(
      seen_, seen_count_, [this](int64_t n) { return N::factor(dx_[n]); }, k_, problem_.dim_qk,
      out);
  for (int64_t d = 0; d < problem_.dim_qk; ++d) out[d] = N::round(out[d]);
}

template <typename N>
void HeadRows<N>::add_dk(Real* dk) const {
  for (int64_t at = 0; at < seen_count_; ++at) {
    const int64_t n = seen_[at];
    if (dx_[n] != 0) add_scaled<N>(dx_[n], q_, problem_.dim_qk, dk + n * problem_.dim_qk);
  }
}

template <typename N>
void HeadRows<N>::add_dv(const Real* dout, Real* dv) const {
  for (int64_t at = 0; at < seen_count_; ++at) {
    const int64_t n = seen_[at];
    const Real weight = N::round(p_[n] * kept_[n]);
    if (weight != 0) add_scaled<N>(weight, dout, problem_.dim_v, dv + n * problem_.dim_v);
  }
}

template <typename N>
void HeadRows<N>::add_dbias(Real* dbias) const {
  for (int64_t at = 0; at < seen_count_; ++at) dbias[seen_[at]] += ds_[seen_[at]];
}

template <typename N>
typename N::Real HeadRows<N>::sink_weight(int64_t h, const RowStats<Real>& stats) const {
  if (stats.sum == 0) return 0;
  const Real sink = load_one<Real>(tensors_.sink, h * tensors_.sink.strides[0]);
  return std::exp(sink - stats.max) / stats.sum;
}

template class HeadRows<Exact>;
template class HeadRows<PlainF32>;
template class HeadRows<PlainTf32>;
template class HeadRows<PlainBf16>;
template class HeadRows<PlainF16>;

}  // namespace fovea::reference
