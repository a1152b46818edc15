// One tile of queries against one block of keys in the backward pass: recomputes the weights p and
// the score gradients ds = p (dp - delta), in the operand forms that the products after it take.
#pragma once

#include "backend/cpu/forward_state.h"

namespace fovea::FOVEA_ISA {

template <typename T, typename M>
class GradientTile {
 public:
  using Elem = typename M::Elem;
  static constexpr int kTileQ = M::kBackwardTileQ;
  static constexpr int kTileKv = M::kBackwardTileKv;
  // Scores and dp lie as right operands do where they can become such in place; else row by row.
  static constexpr bool kInPlace = M::kProductsAreOperands;
  static constexpr int kRun = kInPlace ? M::kPanel : kTileKv;  // columns side by side
  static constexpr int kScoreStride = kInPlace ? M::kPanel : kTileKv + 16;

  // Room to copy a tile of queries or a block of keys without NaN and Inf.
  static int64_t clean_elements(const Arguments& a) {
    return int64_t{kTileKv > kTileQ ? kTileKv : kTileQ} * (a.dim_qk > a.dim_v ? a.dim_qk : a.dim_v);
  }

  template <typename Scratch>
  static std::byte* reserve(const Arguments& a, Scratch& from) {
    ScratchCounter counter;
    Buffers(a, counter);
    return from.template take<std::byte>(static_cast<int64_t>(counter.bytes()));
  }

  GradientTile(const Arguments& a, const Head& head, std::byte* scratch)
      : a_(a),
        head_(head),
        qk_depth_(round_up(a.dim_qk, M::kDepthAlign)),
        v_depth_(round_up(a.dim_v, M::kDepthAlign)),
        terms_(a.has_score_terms()),
        to_log2_(terms_ ? kLog2e : a.scale * kLog2e),
        s_(carve(a, scratch)) {}

  bool all_visible() const { return all_visible_; }

  // Chooses queries [i, i + rows) of the h-th query head of the group and finds the columns of the
  // block that any of them sees; false when none does.
  bool set_rows(int64_t h, int64_t i, int rows, int64_t j, int keys, Columns& columns) {
    h_ = h;
    i_ = i;
    rows_ = rows;
    // Windows move on with the query, so those between the first and the last see nothing else.
    const Row top = row_of(0), bottom = row_of(rows - 1);
    const int64_t begin = larger(top.first_key(), j), end = smaller(bottom.last_key(), j + keys);
    if (end <= begin) return false;
    columns.first = j;
    columns.from = static_cast<int>(begin - j) / M::kColumnAlign * M::kColumnAlign;
    columns.to = static_cast<int>(end - j);
    const int64_t to_pad = j + round_up(columns.to, M::kColumnAlign);
    all_visible_ =
        top.sees_all(j + columns.from, to_pad) && bottom.sees_all(j + columns.from, to_pad);
    return true;
  }

  void pack_keys(int64_t j, int keys) {
    const T* k = row_pointer<T>(a_.k, head_, head_.kv, j, head_.sequence.kv_row);
    const T* v = row_pointer<T>(a_.v, head_, head_.kv, j, head_.sequence.kv_row);
    M::template pack_right_transposed<T>(s_.k_t, k, a_.k.strides.row, keys, a_.dim_qk, qk_depth_);
    if (M::template pack_right<T>(s_.k, k, a_.k.strides.row, keys, kTileKv, a_.dim_qk)) {
      // Rows that see it have a NaN in ds already.
      copy_finite(s_.clean, k, a_.k.strides.row, keys, a_.dim_qk);
      M::template pack_right<T>(s_.k, s_.clean, a_.dim_qk, keys, kTileKv, a_.dim_qk);
    }
    M::template pack_right_transposed<T>(s_.v_t, v, a_.v.strides.row, keys, a_.dim_v, v_depth_);
  }

  void weights(typename M::Left q, typename M::Left dout, const float* lse, const float* delta,
               Columns columns) {
    products(q, dout, columns);
    if (terms_ || a_.drop_threshold != 0) {
      rows_of_weights<Scores::kAny>(lse, delta, columns);
    } else if (!all_visible_) {
      rows_of_weights<Scores::kHidden>(lse, delta, columns);
    } else {
      rows_of_weights<Scores::kPlain>(lse, delta, columns);
    }
  }

  // ds of every row, left in place of dp; for the bias gradient, which needs no operand forms.
  void score_gradients(typename M::Left q, typename M::Left dout, const float* lse,
                       const float* delta, Columns columns) {
    products(q, dout, columns);
    const int to_pad = round_up(columns.to, M::kColumnAlign);
    for (int r = 0; r < rows_; ++r) {
      logits(r, columns);
      const Addend minus_lse(-lse[r]);
      for (int j = columns.from; j < to_pad; j += kLanes) {
        const Vec p = exp2<M::kExp2>(exponent<Scores::kAny>(r, j, minus_lse));
        Vec ds;
        gradient<Scores::kAny>(r, j, p, delta[r], ds);
        store(s_.dp + at(r, j), ds);
      }
    }
  }

  // lse as weights() and score_gradients() take it. An empty row's becomes +inf: its weights are
  // then 2^(x - inf) = 0.
  float lse_for_weights(float lse) const {
    if (lse == kMinusInf) return __builtin_inff();
    return terms_ ? lse : lse * kLog2e;
  }

  float score_gradient(int r, int j) const { return s_.dp[at(r, j)]; }
  const Elem* p_right() const { return s_.p_right; }
  const Elem* ds_right() const { return s_.ds_right; }
  auto ds_left(int from) const {
    if constexpr (kInPlace) {
      return M::left_of_right(s_.ds_right, kTileQ, from);
    } else {
      return M::left_from(s_.ds_left, kScoreStride, from);
    }
  }
  const Elem* k_right() const { return s_.k; }
  T* clean() const { return s_.clean; }

 private:
  // What becomes of scores: nothing but their scale; that, and some are hidden; whatever a problem
  // may ask for.
  enum class Scores { kPlain, kHidden, kAny };

  struct Buffers {
    Elem *k_t, *v_t, *k;  // right operands of the block of keys
    float *scores, *dp;
    Elem *p_right, *ds_right, *ds_left;  // in place: scores, dp and none
    float *keep, *slopes;                // [4][kTileKv]
    T* clean;

    template <typename Scratch>
    Buffers(const Arguments& a, Scratch& from) {
      const int qk_depth = round_up(a.dim_qk, M::kDepthAlign),
                v_depth = round_up(a.dim_v, M::kDepthAlign);
      k_t = from.template take<Elem>(int64_t{kTileKv} * qk_depth);
      v_t = from.template take<Elem>(int64_t{kTileKv} * v_depth);
      k = from.template take<Elem>(int64_t{kTileKv} * round_up(a.dim_qk, M::kColumnAlign));
      scores = from.template take<float>(int64_t{kTileQ} * kScoreStride * (kTileKv / kRun));
      dp = from.template take<float>(int64_t{kTileQ} * kScoreStride * (kTileKv / kRun));
      if constexpr (kInPlace) {
        p_right = scores;
        ds_right = dp;
      } else {
        p_right = from.template take<Elem>(int64_t{kTileQ} * kTileKv);
        ds_right = from.template take<Elem>(int64_t{kTileQ} * kTileKv);
        ds_left = from.template take<Elem>(int64_t{kTileQ} * kScoreStride);
      }
      keep = from.template take<float>(4 * kTileKv);
      slopes = from.template take<float>(4 * kTileKv);
      clean = from.template take<T>(clean_elements(a));
    }
  };

  // Where the score of row r and column j lies.
  FOVEA_INLINE static int64_t at(int r, int j) {
    if constexpr (!kInPlace) return int64_t{r} * kScoreStride + j;
    return int64_t{j / kRun} * kTileQ * kScoreStride + r * kScoreStride + j % kRun;
  }

  Row row_of(int r) const { return row_at(a_, head_, h_, i_ + r); }

  static Buffers carve(const Arguments& a, std::byte* scratch) {
    ScratchCarver carver(scratch);
    return Buffers(a, carver);
  }

  void products(typename M::Left q, typename M::Left dout, Columns columns) {
    product(s_.scores, columns, q, s_.k_t, qk_depth_);
    product(s_.dp, columns, dout, s_.v_t, v_depth_);
  }

  void product(float* to, Columns columns, typename M::Left a, const Elem* right, int depth) {
    const int width = round_up(columns.to, M::kColumnAlign) - columns.from;
    const Elem* const b = right + int64_t{columns.from} * depth;
    if constexpr (kInPlace) {
      M::multiply_to_right(to + at(0, columns.from), kTileQ, rows_, width, depth, a, b, depth);
    } else {
      M::template multiply<false>(to + columns.from, kScoreStride, rows_, width, depth, a, b,
                                  depth);
    }
  }

  // Scores of row r to logits, with what else its gradient needs, in lane r % 4 of the row buffers.
  void logits(int r, Columns columns) {
    const Columns padded{columns.first, columns.from, round_up(columns.to, M::kColumnAlign)};
    const Row row = row_of(r);
    for (int run = padded.from; run < padded.to; run = (run / kRun + 1) * kRun) {
      const int end = static_cast<int>(smaller(padded.to, (run / kRun + 1) * kRun));
      float* const s = s_.scores + at(r, run) - run;
      if (terms_) {
        apply_score_terms<T>(a_, head_, row,
                             {columns.first, run, static_cast<int>(smaller(columns.to, end))}, s,
                             s_.slopes + r % 4 * kTileKv);
      }
      hide_unseen(row, {columns.first, run, end}, s);
    }
    if (a_.drop_threshold != 0) {
      kept_weights(a_, head_, row, padded, s_.keep + r % 4 * kTileKv);
    }
  }

  // What 2 is raised to for the weights of one vector. Logits leave lse before they are scaled: the
  // difference is exact where it matters.
  template <Scores kScores>
  FOVEA_INLINE Vec exponent(int r, int j, const Addend& minus_lse) const {
    const Vec s = load(s_.scores + at(r, j)), c = broadcast(to_log2_);
    return kScores != Scores::kAny || !terms_ ? fma(s, c, minus_lse) : (s + Vec(minus_lse)) * c;
  }

  // From the weights p of one vector: those that dropout leaves, and the gradient of the score
  // before softcap (ds).
  template <Scores kScores>
  FOVEA_INLINE Vec gradient(int r, int j, Vec p, float delta, Vec& ds) const {
    Vec dp = load(s_.dp + at(r, j));
    if constexpr (kScores == Scores::kPlain) {
      ds = p * (dp - broadcast(delta));
      return p;
    }
    p = where_differ(load(s_.scores + at(r, j)), broadcast(kMinusInf), p);
    Vec kept = p;
    if (kScores == Scores::kAny && a_.drop_threshold != 0) {
      const Vec keep = load(s_.keep + r % 4 * kTileKv + j);
      kept = p * keep;
      dp = where_differ(keep, zero(), dp * keep);
    }
    ds = where_differ(p, zero(), p * (dp - broadcast(delta)));
    return kept;
  }

  template <Scores kScores>
  void rows_of_weights(const float* lse, const float* delta, Columns columns) {
    const int to_pad = round_up(columns.to, M::kColumnAlign);
    const int depth = round_up(rows_, M::kDepthAlign);
    for (int r = 0; r < depth; r += 4) {
      const int live = static_cast<int>(smaller(rows_ - r, 4));
      if constexpr (kScores != Scores::kPlain) {
        for (int x = 0; x < live; ++x) logits(r + x, columns);
      }
      if (live == 4) {
        four_rows_of_weights<kScores, true>(r, 4, lse, delta, columns.from, to_pad);
      } else {
        four_rows_of_weights<kScores, false>(r, live, lse, delta, columns.from, to_pad);
      }
    }
  }

  // Columns side by side: with vectors so short that many follow, more.
  static constexpr int kVectorsAtOnce = kLanes == 4 ? 2 : 1;

  // Rows past the live ones are operand padding: zeros.
  template <Scores kScores, bool kAllLive>
  FOVEA_INLINE void four_rows_of_weights(int r, int live, const float* lse, const float* delta,
                                         int from, int to_pad) {
    static_assert(M::kColumnAlign % (kVectorsAtOnce * kLanes) == 0);
    const auto lives = [=](int x) { return kAllLive || x < live; };
    const auto minus_lse = [=](int x) { return Addend(lives(x) ? -lse[r + x] : 0); };
    const Addend minus[4] = {minus_lse(0), minus_lse(1), minus_lse(2), minus_lse(3)};
    for (int first = from; first < to_pad; first += kVectorsAtOnce * kLanes) {
      Vec weights[kVectorsAtOnce * 4];
      each<kVectorsAtOnce * 4>([&](int i) FOVEA_INLINED {
        const int x = i % 4, j = first + i / 4 * kLanes;
        weights[i] = lives(x) ? exponent<kScores>(r + x, j, minus[x]) : zero();
      });
      exp2<M::kExp2>(weights);
      each<kVectorsAtOnce>([&](int vector) FOVEA_INLINED {
        const int j = first + vector * kLanes;
        Vec p[4], ds[4];
        each<4>([&](int x) FOVEA_INLINED {
          if (!lives(x)) {
            p[x] = ds[x] = zero();
            return;
          }
          p[x] = gradient<kScores>(r + x, j, weights[vector * 4 + x], delta[r + x], ds[x]);
          if (kScores == Scores::kAny && a_.softcap > 0) {
            ds[x] = where_differ(ds[x], zero(), ds[x] * load(s_.slopes + x * kTileKv + j));
          }
          if constexpr (!kInPlace) M::store_left(s_.ds_left, kScoreStride, r + x, j, ds[x]);
        });
        M::store_right(s_.p_right, kTileQ, r, j, p);
        M::store_right(s_.ds_right, kTileQ, r, j, ds);
      });
    }
  }

  const Arguments& a_;
  const Head& head_;
  const int qk_depth_, v_depth_;
  const bool terms_;
  const float to_log2_;
  Buffers s_;
  int64_t h_ = 0, i_ = 0;  // the rows: queries [i_, i_ + rows_) of the h_-th query head
  int rows_ = 0;
  bool all_visible_ = true;
};

}  // namespace fovea::FOVEA_ISA
