// What a forward task keeps while it runs, and its exact step: one tile of query rows against one
// block of keys, with the block's own max known before any weight is made.
#pragma once

#include "backend/cpu/kernels.h"
#include "backend/cpu/scores.h"
#include "backend/cpu/scratch.h"

namespace fovea::FOVEA_ISA {

using cpu::ForwardTask;
using cpu::Rows;

template <typename T>
FOVEA_INLINE T* row_pointer(const Rows& t, const Head& head, int64_t h, int64_t row,
                            int64_t first_row) {
  return static_cast<T*>(t.data) + head.sequence.batch_at * t.strides.batch + h * t.strides.head +
         (first_row + row) * t.strides.row;
}

// One tile of rows against the columns of a block that it sees.
template <typename Elem>
struct TileJob {
  int row, rows;
  Columns columns;
  int to_pad;            // columns.to, padded as right operands are
  KeyRange seen_by_all;  // keys that no row of the tile has hidden
  bool first, last;      // of the blocks that the tile sees
  Elem* weights;
};

template <typename T, typename M>
struct ForwardState {
  using Elem = typename M::Elem;
  using Job = TileJob<Elem>;
  static constexpr int kTileQ = M::kTileQ;
  static constexpr int kTileKv = M::kTileKv;
  // Off a power of two, so that rows lie in different cache sets; whole cache lines, so that none
  // is split.
  static constexpr int kScoreStride = kTileKv + 32;

  struct Buffers {
    Row* rows;      // [rows]
    Elem* q;        // left operand [rows][dq_pad]
    float* acc;     // [rows][dv_pad]
    float *m, *l;   // [rows]: reference max in log2 units, sum of weights
    Elem *k, *v;    // right operands of one block
    float* scores;  // [kTileQ][kScoreStride]
    Elem* weights;  // left operand [kTileQ][kScoreStride]; the scores themselves for f32
    float* keep;    // [kTileKv]
    T* clean;       // [kTileKv][dim_v]: V without its NaN and Inf, when it has any
    float* ring;    // one pass: [kTileQ][M::kSlotColumns] scores on their way to weights
    float* sums;    // one pass: [kTileQ][kLanes] sums of one tile's weights

    static int padded_qk(const Arguments& a) { return round_up(a.dim_qk, M::kDepthAlign); }
    static int padded_v(const Arguments& a) { return round_up(a.dim_v, M::kColumnAlign); }

    template <typename Scratch>
    Buffers(const Arguments& a, int64_t count, Scratch& from) {
      const int64_t padded = (count + 31) / 32 * 32;
      const int dq = padded_qk(a), dv = padded_v(a);
      rows = from.template take<Row>(padded);
      q = from.template take<Elem>(padded * dq);
      acc = from.template take<float>(padded * dv);
      m = from.template take<float>(padded);
      l = from.template take<float>(padded);
      k = from.template take<Elem>(int64_t{kTileKv} * dq);
      v = from.template take<Elem>(int64_t{kTileKv} * dv);
      scores = from.template take<float>(int64_t{kTileQ} * kScoreStride);
      if constexpr (sizeof(Elem) == sizeof(float)) {
        weights = reinterpret_cast<Elem*>(scores);
      } else {
        weights = from.template take<Elem>(int64_t{kTileQ} * kScoreStride);
      }
      keep = from.template take<float>(kTileKv);
      clean = from.template take<T>(int64_t{kTileKv} * a.dim_v);
      if constexpr (M::kOnePass) {
        ring = from.template take<float>(int64_t{kTileQ} * M::kSlotColumns);
        sums = from.template take<float>(int64_t{kTileQ} * kLanes);
      }
    }
  };

  ForwardState(const Arguments& args, const ForwardTask& the_task, ScratchCarver& carver)
      : a(args),
        task(the_task),
        head(the_task.head),
        count(static_cast<int>(the_task.row_end - the_task.row_begin)),
        dq_pad(Buffers::padded_qk(args)),
        dv_pad(Buffers::padded_v(args)),
        terms(args.has_score_terms()),
        to_log2(terms ? kLog2e : args.scale * kLog2e),
        s(args, count, carver) {
    const bool counts_sink = a.sink != nullptr && task.key_begin == 0;
    for_rows(a, head, task.row_begin, count, [&](int64_t r, Row row) {
      row.end = smaller(row.end, task.key_end);
      row.prefix = smaller(row.prefix, task.key_end);
      s.rows[r] = row;
      // A sink is a key with no value: it starts the sums.
      s.m[r] = counts_sink ? a.sink[row.head * a.sink_head] * kLog2e : kMinusInf;
      s.l[r] = counts_sink ? 1.0f : 0.0f;
    });
  }

  // The sums of rows [row, row + rows) hold nothing until this is called, or a product is stored.
  void clear_sums(int row, int rows) {
    float* const acc = s.acc + int64_t{row} * dv_pad;
    for (int x = 0; x < rows * dv_pad; x += kLanes) store(acc + x, zero());
  }

  const T* q_row(int r) const {
    return row_pointer<const T>(a.q, head, s.rows[r].head, s.rows[r].i, head.sequence.q_row);
  }
  T* out_row(int r) const {
    return row_pointer<T>(a.out, head, s.rows[r].head, s.rows[r].i, head.sequence.q_row);
  }

  T* k_row(int64_t j) const { return row_pointer<T>(a.k, head, head.kv, j, head.sequence.kv_row); }
  T* v_row(int64_t j) const { return row_pointer<T>(a.v, head, head.kv, j, head.sequence.kv_row); }

  // Keys that some of rows [from, to) see, and keys that all of them see.
  struct Sight {
    KeyRange some, all;
  };
  Sight sight_of(int from, int to) const {
    Sight sight{{task.key_end, task.key_begin}, {task.key_begin, task.key_end}};
    for (int r = from; r < to; ++r) {
      const Row& row = s.rows[r];
      sight.all.begin = larger(sight.all.begin, row.begin <= row.prefix ? 0 : row.begin);
      sight.all.end = smaller(sight.all.end, row.end);
      if (row.last_key() <= row.first_key()) continue;
      sight.some.begin = smaller(sight.some.begin, row.first_key());
      sight.some.end = larger(sight.some.end, row.last_key());
    }
    sight.some.begin = larger(sight.some.begin, task.key_begin);
    return sight;
  }

  void pack_block(int64_t j, int keys) {
    M::template pack_right_transposed<T>(s.k, k_row(j), a.k.strides.row, keys, a.dim_qk, dq_pad);
    v_depth = round_up(keys, M::kColumnAlign);
    v_nonfinite = M::template pack_right<T>(s.v, v_row(j), a.v.strides.row, keys, v_depth, a.dim_v);
    if (!v_nonfinite) return;
    copy_finite(s.clean, v_row(j), a.v.strides.row, keys, a.dim_v);
    M::template pack_right<T>(s.v, s.clean, a.dim_v, keys, v_depth, a.dim_v);
  }

  typename M::Left queries_of(const Job& job) const {
    return M::left(s.q + int64_t{job.row} * dq_pad, dq_pad);
  }
  typename M::Left weights_of(const Job& job) const {
    return M::left_from(job.weights, kScoreStride, job.columns.from);
  }
  const Elem* keys_of(int column) const { return s.k + int64_t{column} * dq_pad; }
  const Elem* values_of(const Job& job) const {
    return s.v + int64_t{job.columns.from} * M::kPanel;
  }

  void exact_tile(const Job& job) {
    if (job.first) clear_sums(job.row, job.rows);
    const int width = job.to_pad - job.columns.from;
    M::template multiply<false>(s.scores + job.columns.from, kScoreStride, job.rows, width, dq_pad,
                                queries_of(job), keys_of(job.columns.from), dq_pad);
    Elem* const weights = job.weights;
    float top[kTileQ];  // of all rows first: what one row waits for, others need not
    for (int r = 0; r < job.rows; ++r) {
      top[r] = largest_logit(job.row + r, s.scores + r * kScoreStride, job.columns, job.to_pad);
    }
    for (int r = 0; r < job.rows; ++r) {
      softmax_row(job.row + r, top[r], s.scores + r * kScoreStride, job.columns, job.to_pad,
                  [=](int j, Vec p) { M::store_left(weights, kScoreStride, r, j, p); });
    }
    M::template multiply<true>(s.acc + int64_t{job.row} * dv_pad, dv_pad, job.rows, dv_pad, width,
                               weights_of(job), values_of(job), v_depth);
    if (v_nonfinite) add_nonfinite(job);
  }

  // Vectors of weights made side by side: with vectors so short that many follow, more.
  static constexpr int kWeightsAtOnce = kLanes == 4 ? 8 : 2;

  // One row of scores to logits, but for their scale where that is all; the largest, in log2 units.
  FOVEA_INLINE float largest_logit(int r, float* x, Columns columns, int to_pad) const {
    const Row& row = s.rows[r];
    if (terms) apply_score_terms<T>(a, head, row, columns, x, nullptr);
    if (!row.sees_all(columns.first + columns.from, columns.first + to_pad)) {
      hide_unseen(row, {columns.first, columns.from, to_pad}, x);
    }
    Vec top = broadcast(kMinusInf), top2 = top;
    int j = columns.from;
    for (; j + 2 * kLanes <= to_pad; j += 2 * kLanes) {
      top = max(top, load(x + j));
      top2 = max(top2, load(x + j + kLanes));
    }
    for (; j < to_pad; j += kLanes) top = max(top, load(x + j));
    return largest(max(top, top2)) * to_log2;
  }

  // One row of logits to weights; the sums so far move to the new reference.
  template <typename StoreWeights>
  FOVEA_INLINE void softmax_row(int r, float block_max, const float* x, Columns columns, int to_pad,
                                StoreWeights put) {
    const float old_max = s.m[r];
    // A reference need not be the largest: sums move only where scores outgrew it by far.
    constexpr float kFar = 8;
    const float new_max = block_max > old_max + kFar ? block_max : old_max;
    const float base = new_max == kMinusInf ? 0 : new_max;
    const bool dropout = a.drop_threshold != 0;
    if (dropout) kept_weights(a, head, s.rows[r], {columns.first, columns.from, to_pad}, s.keep);

    const Vec c = broadcast(to_log2);
    const Addend minus_base(-base);
    Vec sums[2] = {zero(), zero()};
    const auto weigh = [&]<int kCount>(int from) FOVEA_INLINED {
      Vec p[kCount];
      for (int i = 0; i < kCount; ++i) p[i] = fma(load(x + from + i * kLanes), c, minus_base);
      exp2<M::kExp2>(p);
      for (int i = 0; i < kCount; ++i) sums[i % 2] = sums[i % 2] + p[i];
      for (int i = 0; i < kCount; ++i) {
        if (dropout) p[i] = p[i] * load(s.keep + from + i * kLanes);
        put(from + i * kLanes, p[i]);
      }
    };
    int j = columns.from;
    if constexpr (kWeightsAtOnce > 2) {
      for (; j + kWeightsAtOnce * kLanes <= to_pad; j += kWeightsAtOnce * kLanes) {
        weigh.template operator()<kWeightsAtOnce>(j);
      }
      if (j + 4 * kLanes <= to_pad) {
        weigh.template operator()<4>(j);
        j += 4 * kLanes;
      }
    }
    for (; j < to_pad; j += 2 * kLanes) weigh.template operator()<2>(j);
    if (new_max != old_max && old_max == kMinusInf) {
      s.m[r] = new_max;  // nothing has been summed
    } else if (new_max != old_max) {
      const float shrink = exp2_scalar(old_max - new_max);
      s.l[r] *= shrink;
      s.m[r] = new_max;
      float* const acc = s.acc + int64_t{r} * dv_pad;
      for (int d = 0; d < dv_pad; d += kLanes) store(acc + d, load(acc + d) * broadcast(shrink));
    }
    s.l[r] += sum(sums[0] + sums[1]);
  }

  // The NaN and Inf that were left out of the packed V, for the rows that see them.
  void add_nonfinite(const Job& job) {
    for (int j = job.columns.from; j < job.columns.to; ++j) {
      const int64_t key = job.columns.first + j;
      const T* const v = v_row(key);
      if (!has_nonfinite(v, 0, 1, a.dim_v)) continue;
      for (int r = job.row; r < job.row + job.rows; ++r) {
        if (!sees<T>(a, head, s.rows[r], key)) continue;
        for (int d = 0; d < a.dim_v; ++d) {
          const float x = to_float(v[d]);
          if (x - x != 0) s.acc[int64_t{r} * dv_pad + d] += x;
        }
      }
    }
  }

  const Arguments& a;
  const ForwardTask& task;
  const Head& head;
  const int count;
  const int dq_pad, dv_pad;
  const bool terms;
  const float to_log2;  // from what scores hold to log2 units
  Buffers s;
  int v_depth = 0;  // of the block's V, padded
  bool v_nonfinite = false;
};

}  // namespace fovea::FOVEA_ISA
