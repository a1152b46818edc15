// The forward task: blocks of keys are packed once and met by every tile of query rows of the task;
// each tile keeps a running max and sum (online softmax), so no score outlives its block.
#pragma once

#include "backend/cpu/kernels.h"
#include "backend/cpu/scores.h"
#include "backend/cpu/scratch.h"
#include "backend/cpu/stream.h"

namespace fovea::FOVEA_ISA {

using cpu::ForwardTask;
using cpu::Rows;

template <typename T>
FOVEA_INLINE T* row_pointer(const Rows& t, const Head& head, int64_t h, int64_t row,
                            int64_t first_row) {
  return static_cast<T*>(t.data) + head.sequence.batch_at * t.strides.batch + h * t.strides.head +
         (first_row + row) * t.strides.row;
}

template <typename T, typename M>
class Forward {
 public:
  using Elem = typename M::Elem;

  static size_t scratch_bytes(const Arguments& a, int64_t rows) {
    ScratchCounter counter;
    Buffers buffers(a, rows, counter);
    return counter.bytes();
  }

  static void run(const Arguments& a, const ForwardTask& task, std::byte* scratch) {
    ScratchCarver carver(scratch);
    Forward self(a, task, carver);
    if (self.count_ <= M::kStreamRows) {
      self.stream();
    } else {
      M::begin();
      self.blocks();
      M::end();
    }
    self.finish();
  }

  static int64_t partial_floats(const Arguments& a, int64_t rows) {
    return rows * (Buffers::padded_v(a) + 2);
  }

  // Sums of `count` partials of the same rows, over different keys.
  static void join(const Arguments& a, const ForwardTask& task, const float* partials,
                   int64_t stride, int count) {
    const int64_t rows = task.row_end - task.row_begin;
    const int dv_pad = Buffers::padded_v(a);
    for (int64_t r = 0; r < rows; ++r) {
      const auto max_of = [&](int part) { return partials[part * stride + rows * dv_pad + r]; };
      float m = kMinusInf;
      for (int part = 0; part < count; ++part) m = max_of(part) > m ? max_of(part) : m;
      float l = 0;
      const Row row = row_at(a, task.head, task.row_begin + r);
      T* const out = row_pointer<T>(a.out, task.head, row.head, row.i, task.head.sequence.q_row);
      float weights[cpu::kMaxPartials];
      for (int part = 0; part < count; ++part) {
        const float mp = max_of(part);
        weights[part] = mp == kMinusInf ? 0 : exp2_scalar(mp - m);
        l += weights[part] * partials[part * stride + rows * (dv_pad + 1) + r];
      }
      const float inverse = l == 0 ? 0 : 1 / l;
      for (int d = 0; d < a.dim_v; d += kLanes) {
        Vec sum = zero();
        for (int part = 0; part < count; ++part) {
          if (weights[part] == 0) continue;  // what it holds does not count, not even NaN
          sum = fma(broadcast(weights[part]), load(partials + part * stride + r * dv_pad + d), sum);
        }
        store_up_to(out + d, sum * broadcast(inverse), a.dim_v - d);
      }
      write_lse(a, task.head, row, m, l);
    }
  }

 private:
  static constexpr int kTileQ = M::kTileQ;
  static constexpr int kTileKv = M::kTileKv;
  static constexpr int kScoreStride =
      kTileKv + 16;  // off a power of two: rows in different cache sets

  struct Buffers {
    Row* rows;      // [rows]
    Elem* q;        // left operand [rows][dq_pad]
    float* acc;     // [rows][dv_pad]
    float *m, *l;   // [rows], log2 units
    Elem *k, *v;    // right operands of one block
    float* scores;  // [kTileQ][kScoreStride]
    Elem* weights;  // left operand [kTileQ][kScoreStride]; the scores themselves for f32
    float* keep;    // [kTileKv]
    T* clean;       // [kTileKv][dim_v]: V without its NaN and Inf, when it has any
    float* stream_q;

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
      stream_q = from.template take<float>(int64_t{M::kStreamRows} * round_up(a.dim_qk, 2 * kLanes));
    }
  };

  Forward(const Arguments& a, const ForwardTask& task, ScratchCarver& carver)
      : a_(a),
        task_(task),
        head_(task.head),
        count_(static_cast<int>(task.row_end - task.row_begin)),
        dq_pad_(Buffers::padded_qk(a)),
        dv_pad_(Buffers::padded_v(a)),
        terms_(a.has_score_terms()),
        to_log2_(terms_ ? kLog2e : a.scale * kLog2e),
        s_(a, count_, carver) {
    const bool counts_sink = a.sink != nullptr && task.key_begin == 0;
    for (int r = 0; r < count_; ++r) {
      Row row = row_at(a, head_, task.row_begin + r);
      row.end = smaller(row.end, task.key_end);
      row.prefix = smaller(row.prefix, task.key_end);
      s_.rows[r] = row;
      // A sink is a key with no value: it starts the sums.
      s_.m[r] = counts_sink ? a.sink[row.head * a.sink_head] * kLog2e : kMinusInf;
      s_.l[r] = counts_sink ? 1.0f : 0.0f;
    }
    for (int64_t x = 0; x < int64_t{count_} * dv_pad_; x += kLanes) store(s_.acc + x, zero());
  }

  T* k_row(int64_t j) const {
    return row_pointer<T>(a_.k, head_, head_.kv, j, head_.sequence.kv_row);
  }
  T* v_row(int64_t j) const {
    return row_pointer<T>(a_.v, head_, head_.kv, j, head_.sequence.kv_row);
  }

  // Keys that some of rows [from, to) see.
  KeyRange seen_by(int from, int to) const {
    KeyRange range{task_.key_end, task_.key_begin};
    for (int r = from; r < to; ++r) {
      const Row& row = s_.rows[r];
      if (row.last_key() <= row.first_key()) continue;
      range.begin = smaller(range.begin, row.first_key());
      range.end = larger(range.end, row.last_key());
    }
    range.begin = larger(range.begin, task_.key_begin);
    return range;
  }

  void blocks() {
    for (int r = 0; r < count_; ++r) {
      const T* q = row_pointer<T>(a_.q, head_, s_.rows[r].head, s_.rows[r].i, head_.sequence.q_row);
      M::pack_left_row(s_.q, dq_pad_, r, q, a_.dim_qk, dq_pad_);
    }
    const KeyRange all = seen_by(0, count_);
    const int64_t first = task_.key_begin + (all.begin - task_.key_begin) / kTileKv * kTileKv;
    for (int64_t j = first; j < all.end; j += kTileKv) {
      const int keys = static_cast<int>(smaller(kTileKv, task_.key_end - j));
      bool packed = false;
      for (int r = 0; r < count_; r += kTileQ) {
        const int rows = static_cast<int>(smaller(kTileQ, count_ - r));
        const KeyRange seen = seen_by(r, r + rows);
        if (seen.end <= j || seen.begin >= j + keys) continue;
        if (!packed) {
          pack_block(j, keys);
          packed = true;
        }
        Columns columns;
        columns.first = j;
        columns.from =
            static_cast<int>(larger(seen.begin - j, 0)) / M::kColumnAlign * M::kColumnAlign;
        columns.to = static_cast<int>(smaller(seen.end - j, keys));
        tile(r, rows, columns);
      }
    }
  }

  void pack_block(int64_t j, int keys) {
    M::template pack_right_transposed<T>(s_.k, k_row(j), a_.k.strides.row, keys, a_.dim_qk,
                                         dq_pad_);
    const T* v = v_row(j);
    int64_t stride = a_.v.strides.row;
    v_nonfinite_ = has_nonfinite(v, stride, keys, a_.dim_v);
    if (v_nonfinite_) {
      copy_finite(s_.clean, v, stride, keys, a_.dim_v);
      v = s_.clean;
      stride = a_.dim_v;
    }
    M::template pack_right<T>(s_.v, v, stride, keys, kTileKv, a_.dim_v);
  }

  void tile(int r0, int rows, Columns columns) {
    const int to_pad = round_up(columns.to, M::kColumnAlign);
    M::template multiply<false>(s_.scores + columns.from, kScoreStride, rows, to_pad - columns.from,
                                dq_pad_, M::left(s_.q + int64_t{r0} * dq_pad_, dq_pad_),
                                s_.k + int64_t{columns.from} * dq_pad_, dq_pad_);
    for (int r = 0; r < rows; ++r) {
      float* const s = s_.scores + r * kScoreStride;
      softmax_row(r0 + r, s, columns, to_pad,
                  [&](int j, Vec p) { M::store_left(s_.weights, kScoreStride, r, j, p); });
    }
    M::template multiply<true>(s_.acc + int64_t{r0} * dv_pad_, dv_pad_, rows, dv_pad_,
                               to_pad - columns.from,
                               M::left_from(s_.weights, kScoreStride, columns.from),
                               s_.v + int64_t{columns.from} * M::kPanel, kTileKv);
    if (v_nonfinite_) add_nonfinite(r0, rows, columns);
  }

  // One row of scores to weights; the sums so far move to the new max.
  template <typename StoreWeights>
  FOVEA_INLINE void softmax_row(int r, float* s, Columns columns, int to_pad, StoreWeights put) {
    const Row& row = s_.rows[r];
    if (terms_) apply_score_terms<T>(a_, head_, row, columns, s, nullptr);
    if (!row.sees_all(columns.first + columns.from, columns.first + to_pad)) {
      hide_unseen(row, {columns.first, columns.from, to_pad}, s);
    }
    Vec top = broadcast(kMinusInf), top2 = top;
    int j = columns.from;
    for (; j + 2 * kLanes <= to_pad; j += 2 * kLanes) {
      top = max(top, load(s + j));
      top2 = max(top2, load(s + j + kLanes));
    }
    for (; j < to_pad; j += kLanes) top = max(top, load(s + j));
    const float block_max = largest(max(top, top2)) * to_log2_;
    const float old_max = s_.m[r];
    const float new_max = block_max > old_max ? block_max : old_max;
    const float base = new_max == kMinusInf ? 0 : new_max;
    const bool dropout = a_.drop_threshold != 0;
    if (dropout) kept_weights(a_, head_, row, {columns.first, columns.from, to_pad}, s_.keep);

    const Vec c = broadcast(to_log2_), minus_base = broadcast(-base);
    Vec sum0 = zero(), sum1 = zero();
    for (j = columns.from; j < to_pad; j += 2 * kLanes) {
      Vec p0 = exp2<M::kExp2>(fma(load(s + j), c, minus_base));
      Vec p1 = exp2<M::kExp2>(fma(load(s + j + kLanes), c, minus_base));
      sum0 = sum0 + p0;
      sum1 = sum1 + p1;
      if (dropout) {
        p0 = p0 * load(s_.keep + j);
        p1 = p1 * load(s_.keep + j + kLanes);
      }
      put(j, p0);
      put(j + kLanes, p1);
    }
    if (new_max != old_max) {
      const float shrink = old_max == kMinusInf ? 0 : exp2_scalar(old_max - new_max);
      s_.l[r] *= shrink;
      s_.m[r] = new_max;
      float* const acc = s_.acc + int64_t{r} * dv_pad_;
      for (int d = 0; d < dv_pad_; d += kLanes) store(acc + d, load(acc + d) * broadcast(shrink));
    }
    s_.l[r] += sum(sum0 + sum1);
  }

  // The NaN and Inf that were left out of the packed V, for the rows that give them weight.
  void add_nonfinite(int r0, int rows, Columns columns) {
    for (int j = columns.from; j < columns.to; ++j) {
      const T* v = v_row(columns.first + j);
      for (int d = 0; d < a_.dim_v; ++d) {
        const float x = to_float(v[d]);
        if (x - x == 0) continue;
        for (int r = 0; r < rows; ++r) {
          const float p = M::left_at(s_.weights, kScoreStride, r, j);
          if (p != 0) s_.acc[int64_t{r0 + r} * dv_pad_ + d] += p * x;
        }
      }
    }
  }

  // Few rows: keys are read once, where they lie.
  void stream() {
    const int q_stride = round_up(a_.dim_qk, 2 * kLanes);
    for (int r = 0; r < count_; ++r) {
      const T* q = row_pointer<T>(a_.q, head_, s_.rows[r].head, s_.rows[r].i, head_.sequence.q_row);
      stream_query(s_.stream_q + r * q_stride, q, a_.dim_qk);
    }
    const KeyRange seen = seen_by(0, count_);
    for (int64_t j = seen.begin / 4 * 4; j < seen.end; j += kStreamKeys) {
      const int keys = static_cast<int>(smaller(kStreamKeys, seen.end - j));
      const int padded = round_up(keys, 2 * kLanes);
      in_row_groups(count_, [&]<int kRows>(int r) {
        stream_score_rows<kRows>(s_.scores + r * kScoreStride, kScoreStride, s_.stream_q + r * q_stride,
                                 q_stride, k_row(j), a_.k.strides.row, keys, a_.dim_qk);
      });
      for (int r = 0; r < count_; ++r) {
        float* const s = s_.scores + r * kScoreStride;
        for (int x = keys; x < padded; ++x) s[x] = kMinusInf;
        softmax_row(r, s, {j, 0, keys}, padded, [&](int x, Vec p) { store(s + x, p); });
      }
      in_row_groups(count_, [&]<int kRows>(int r) {
        stream_value_rows<kRows>(s_.acc + int64_t{r} * dv_pad_, dv_pad_, s_.scores + r * kScoreStride,
                                 kScoreStride, v_row(j), a_.v.strides.row, keys, a_.dim_v);
      });
    }
  }

  void finish() {
    if (task_.partial != nullptr) {
      float* const p = task_.partial;
      const int64_t sums = int64_t{count_} * dv_pad_;
      for (int64_t x = 0; x < sums; x += kLanes) store(p + x, load(s_.acc + x));
      for (int r = 0; r < count_; ++r) {
        p[sums + r] = s_.m[r];
        p[sums + count_ + r] = s_.l[r];
      }
      return;
    }
    for (int r = 0; r < count_; ++r) {
      const Row& row = s_.rows[r];
      T* const out = row_pointer<T>(a_.out, head_, row.head, row.i, head_.sequence.q_row);
      const Vec inverse = broadcast(s_.l[r] == 0 ? 0 : 1 / s_.l[r]);
      for (int d = 0; d < a_.dim_v; d += kLanes) {
        store_up_to(out + d, load(s_.acc + int64_t{r} * dv_pad_ + d) * inverse, a_.dim_v - d);
      }
      write_lse(a_, head_, row, s_.m[r], s_.l[r]);
    }
  }

  static void write_lse(const Arguments& a, const Head& head, const Row& row, float m, float l) {
    if (a.lse.data == nullptr) return;
    a.lse.at(head.sequence.batch_at, row.head, head.sequence.q_row + row.i) =
        l == 0 ? kMinusInf : (m + __builtin_log2f(l)) * kLn2;
  }

  const Arguments& a_;
  const ForwardTask& task_;
  const Head& head_;
  const int count_;
  const int dq_pad_, dv_pad_;
  const bool terms_;
  const float to_log2_;  // from what scores hold to log2 units
  Buffers s_;
  bool v_nonfinite_ = false;
};

}  // namespace fovea::FOVEA_ISA
