// The forward step where products are so fast that moving scores counts (AVX-512, AMX): weights
// are made slot by slot of columns, while a slot's scores are still in the nearest cache, in one
// pass over them.
//
// So that weights can be made from a slot alone, their exponents refer to a max that is known
// before: that of the row's first slot, and it stays. Float exponents leave room for weights up to
// kHeadroom above it; rows whose sums say otherwise are done again, exactly.
#pragma once

#include "backend/cpu/forward_state.h"

namespace fovea::FOVEA_ISA {

template <typename T, typename M>
class OnePass {
 public:
  using State = ForwardState<T, M>;
  using Job = typename State::Job;

  explicit OnePass(State& state) : t_(state) {}

  // The tile of `next`, which may be null, follows.
  void tile(const Job& job, const Job* next) {
    for (int r = 0; r < job.rows; ++r) store(t_.s.sums + r * kLanes, zero());
    const Lines queries = next != nullptr && next->first ? lines(t_.a.q, next->row) : Lines{};
    const Lines outs = job.last ? lines(t_.a.out, job.row) : Lines{};
    for (int from = job.columns.from; from < job.to_pad; from += kSlot) {
      const int width = static_cast<int>(smaller(kSlot, job.to_pad - from));
      const Lines soon = lines_beside((from - job.columns.from) / kSlot, queries, outs);
      M::template multiply<false>(t_.s.ring, kSlot, job.rows, width, t_.dq_pad, t_.queries_of(job),
                                  t_.keys_of(from), t_.dq_pad);
      hide_unseen_of(job, from, width);
      if (from == job.columns.from) set_reference(job, width);
      width == kSlot ? weights<kSlot>(job, from, soon) : weights<kSlot / 2>(job, from, soon);
    }
    if (sum_lanes(job)) return add_rows(job, 0, job.rows);
    // Rows that need a second try get it last: the scores of it take the place of weights.
    for (int r = 0, end = 0; r < job.rows; r = end) {
      end = end_of_run(job, r);
      if (good(job, r)) add_rows(job, r, end);
    }
    for (int r = 0, end = 0; r < job.rows; r = end) {
      end = end_of_run(job, r);
      if (!good(job, r)) t_.exact_tile(rows_of(job, r, end));
    }
  }

 private:
  static constexpr int kSlot = M::kSlotColumns;
  static_assert(kSlot == 2 * M::kColumnAlign, "a tile ends on a whole or a half slot");
  static constexpr float kHeadroom = 0x1p40f;

  // A cache line of each row of a tile, one row after another. The rows of a head lie apart in
  // memory, in runs too short for the hardware to foresee the next, and asking for many at once
  // holds up the loads that follow: so one line is asked for beside each row of weights. Past the
  // last row some are asked for in vain.
  struct Lines {
    const T* at = nullptr;
    int64_t heads = 0, head = 0;  // of a query; the head of `at`
    int64_t to_head = 0, to_query = 0;

    void ask_for_one() {
      __builtin_prefetch(at, 0, kSecondLevel);
      const bool last = ++head == heads;
      at += last ? to_query : to_head;
      head = last ? 0 : head;
    }
  };
  static constexpr int kLine = 64 / sizeof(T);
  static constexpr int kSecondLevel = 2;  // the cache to fetch them to

  // The first line of each row from `row` on.
  Lines lines(const Rows& t, int row) const {
    const int64_t heads = t_.a.group;
    const Row& r = t_.s.rows[row];
    return {.at = row_pointer<const T>(t, t_.head, r.head, r.i, t_.head.sequence.q_row),
            .heads = heads,
            .head = r.head - t_.head.kv * heads,
            .to_head = t.strides.head,
            .to_query = t.strides.row - (heads - 1) * t.strides.head};
  }

  // Beside slot after slot: the next tile's queries, then the rows that this one writes.
  Lines lines_beside(int slot, const Lines& queries, const Lines& outs) const {
    const auto from = [](Lines lines, int column) {
      lines.at += column;
      return lines;
    };
    const Arguments& a = t_.a;
    int at = slot * kLine;
    if (queries.at != nullptr) {
      if (at < a.dim_qk) return from(queries, at);
      at -= round_up(a.dim_qk, kLine);
    }
    if (outs.at != nullptr && at < a.dim_v) return from(outs, at);
    return {.at = reinterpret_cast<const T*>(t_.s.ring)};  // none: a line that is near
  }

  void hide_unseen_of(const Job& job, int from, int width) {
    const Columns columns{job.columns.first + from, 0, width};
    if (columns.first >= job.seen_by_all.begin && columns.first + width <= job.seen_by_all.end)
      return;
    for (int r = 0; r < job.rows; ++r) {
      const Row& row = t_.s.rows[job.row + r];
      if (!row.sees_all(columns.first, columns.first + width)) {
        hide_unseen(row, columns, t_.s.ring + r * kSlot);
      }
    }
  }

  // A max for rows that have none yet, from the tile's first slot. A row that sees no key there
  // keeps none, and its sum will be infinite or NaN.
  void set_reference(const Job& job, int width) {
    for (int r = 0; r < job.rows; ++r) {
      float& m = t_.s.m[job.row + r];
      if (m != kMinusInf) continue;
      Vec top = load(t_.s.ring + r * kSlot);
      for (int j = kLanes; j < width; j += kLanes) top = max(top, load(t_.s.ring + r * kSlot + j));
      const float found = largest(top) * t_.to_log2;
      if (found - found == 0) m = found;
    }
  }

  template <int kWidth>
  void weights(const Job& job, int from, Lines soon) {
    typename M::Elem* const weights = job.weights;
    const float* const scores = t_.s.ring;
    const float* const m = t_.s.m + job.row;
    float* const sums = t_.s.sums;
    const Vec c = broadcast(t_.to_log2);
    for (int r = 0; r < job.rows; ++r) {
      const Vec minus_m = broadcast(-m[r]);
      Vec total = load(sums + r * kLanes);
      for (int j = 0; j < kWidth; j += 2 * kLanes) {
        const Vec p0 = exp2<M::kExp2>(fma(load(scores + r * kSlot + j), c, minus_m));
        const Vec p1 = exp2<M::kExp2>(fma(load(scores + r * kSlot + j + kLanes), c, minus_m));
        total = total + (p0 + p1);
        M::store_left_two(weights, State::kScoreStride, r, from + j, p0, p1);
      }
      store(sums + r * kLanes, total);
      soon.ask_for_one();
    }
  }

  template <bool kAccumulate>
  void add_values(const Job& job) {
    M::template multiply<kAccumulate>(t_.s.acc + int64_t{job.row} * t_.dv_pad, t_.dv_pad, job.rows,
                                      t_.dv_pad, job.to_pad - job.columns.from, t_.weights_of(job),
                                      t_.values_of(job), t_.v_depth);
  }

  // The sum of each row's weights, from here on in its first lane; false when any outgrew its
  // reference.
  bool sum_lanes(const Job& job) {
    bool all = true;
    for (int r = 0; r < job.rows; ++r) {
      float* const lanes = t_.s.sums + r * kLanes;
      lanes[0] = sum(load(lanes));
      all = all && lanes[0] < kHeadroom;
    }
    return all;
  }
  float sum_of(int r) const { return t_.s.sums[r * kLanes]; }

  // Whether the sums of rows from r on that products take together are as small as their reference
  // allows.
  bool good(const Job& job, int r) const {
    for (int end = group_end(job, r); r < end; ++r) {
      if (!(sum_of(r) < kHeadroom)) return false;
    }
    return true;
  }
  static int group_end(const Job& job, int r) {
    return static_cast<int>(smaller(r + M::kRowAlign, job.rows));
  }

  // One past the rows that are all good, or all not, as those at r are.
  int end_of_run(const Job& job, int r) const {
    const bool first = good(job, r);
    do {
      r = group_end(job, r);
    } while (r < job.rows && good(job, r) == first);
    return r;
  }

  static Job rows_of(Job job, int from, int to) {
    job.row += from;
    job.rows = to - from;
    return job;
  }

  void add_rows(const Job& job, int from, int to) {
    for (int r = from; r < to; ++r) t_.s.l[job.row + r] += sum_of(r);
    Job part = rows_of(job, from, to);
    part.weights += from * State::kScoreStride;
    part.first ? add_values<false>(part) : add_values<true>(part);
    if (t_.v_nonfinite) t_.add_nonfinite(part);
  }

  State& t_;
};

}  // namespace fovea::FOVEA_ISA
