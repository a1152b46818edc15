// The forward task: blocks of keys are packed once and met by every tile of query rows of the task;
// each row keeps a running max and sum (online softmax), so no score outlives its block.
#pragma once

#include "backend/cpu/forward_one_pass.h"
#include "backend/cpu/forward_state.h"
#include "backend/cpu/stream.h"

namespace fovea::FOVEA_ISA {

template <typename T, typename M>
class Forward {
 public:
  static size_t scratch_bytes(const Arguments& a, int64_t rows) {
    ScratchCounter counter;
    typename State::Buffers buffers(a, rows, counter);
    StreamBuffers stream(a, counter);
    return counter.bytes();
  }

  static void run(const Arguments& a, const ForwardTask& task, std::byte* scratch) {
    ScratchCarver carver(scratch);
    State state(a, task, carver);
    if (state.count <= M::kStreamRows) {
      StreamBuffers buffers(a, carver);
      stream(state, buffers);
      finish(state, 0, state.count);
    } else {
      M::begin();
      blocks(state);
      M::end();
    }
  }

  static int64_t partial_floats(const Arguments& a, int64_t rows) {
    return rows * (State::Buffers::padded_v(a) + 2);
  }

  // Sums of `count` partials of the same rows, over different keys.
  static void join(const Arguments& a, const ForwardTask& task, const float* partials,
                   int64_t stride, int count) {
    const int64_t rows = task.row_end - task.row_begin;
    const int dv_pad = State::Buffers::padded_v(a);
    for_rows(a, task.head, task.row_begin, rows, [&](int64_t r, const Row& row) {
      const auto max_of = [&](int part) { return partials[part * stride + rows * dv_pad + r]; };
      float m = kMinusInf;
      for (int part = 0; part < count; ++part) m = max_of(part) > m ? max_of(part) : m;
      float l = 0;
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
          if (max_of(part) == kMinusInf) continue;  // it saw nothing: what it holds does not count
          sum = fma(broadcast(weights[part]), load(partials + part * stride + r * dv_pad + d), sum);
        }
        store_up_to(out + d, sum * broadcast(inverse), a.dim_v - d);
      }
      if (a.lse.data == nullptr) return;
      write_lse(a, task.head, row, lse_of(broadcast(m), broadcast(l))[0]);
    });
  }

 private:
  using State = ForwardState<T, M>;
  using Job = typename State::Job;

  // Keys in flight between the two products of a stream; their scores and the queries, in float.
  struct StreamBuffers {
    static constexpr int kStride = kStreamKeys + 16;
    float *q, *scores;
    template <typename Scratch>
    StreamBuffers(const Arguments& a, Scratch& from) {
      q = from.template take<float>(int64_t{M::kStreamRows} * round_up(a.dim_qk, 2 * kLanes));
      scores = from.template take<float>(int64_t{M::kStreamRows} * kStride);
    }
  };

  // Rows that are met together wherever a mask cuts what they see, and the keys that they see.
  static constexpr int kStrip = M::kCutTileQ;
  static constexpr int kMaxStrips = M::kRowsPerTask / kStrip;
  struct Strip {
    int row, rows;
    typename State::Sight sight;
  };

  static void blocks(State& t) {
    Strip strips[kMaxStrips];
    int strip_count = 0;
    KeyRange all{t.task.key_end, t.task.key_begin};
    for (int r = 0; r < t.count; r += kStrip) {
      const int rows = static_cast<int>(smaller(kStrip, t.count - r));
      const auto sight = t.sight_of(r, r + rows);
      if (sight.some.end <= sight.some.begin) {
        t.clear_sums(r, rows);
        finish(t, r, rows);
        continue;
      }
      strips[strip_count++] = {r, rows, sight};
      all.begin = smaller(all.begin, sight.some.begin);
      all.end = larger(all.end, sight.some.end);
    }
    const int64_t begin = t.task.key_begin;
    for (int64_t j = begin + (all.begin - begin) / State::kTileKv * State::kTileKv; j < all.end;
         j += State::kTileKv) {
      const int keys = static_cast<int>(smaller(State::kTileKv, t.task.key_end - j));
      Job jobs[kMaxStrips];
      int count = 0;
      for (int i = 0; i < strip_count; ++i) {
        const KeyRange seen = strips[i].sight.some;
        if (seen.end <= j || seen.begin >= j + keys) continue;
        const Job job = job_of(t, strips[i], j, keys);
        if (count == 0 || !joined(jobs[count - 1], job)) jobs[count++] = job;
      }
      if (count == 0) continue;
      t.pack_block(j, keys);
      for (int i = 0; i < count; ++i) {
        if (jobs[i].first) pack_queries(t, jobs[i]);
        tile(t, jobs[i], i + 1 < count ? &jobs[i + 1] : nullptr);
        if (jobs[i].last) finish(t, jobs[i].row, jobs[i].rows);
      }
    }
  }

  // Adds the rows of `next` to `job` where all of both see the same columns and a tile has room.
  static bool joined(Job& job, const Job& next) {
    const auto same_for_all = [&](const Job& x) {
      return x.columns.from == job.columns.from && x.columns.to == job.columns.to &&
             x.seen_by_all.begin <= x.columns.first + x.columns.from &&
             x.seen_by_all.end >= x.columns.first + x.columns.to;
    };
    if (job.row + job.rows != next.row || job.rows + next.rows > State::kTileQ ||
        job.first != next.first || job.last != next.last || !same_for_all(job) ||
        !same_for_all(next)) {
      return false;
    }
    job.rows += next.rows;
    job.seen_by_all.begin = larger(job.seen_by_all.begin, next.seen_by_all.begin);
    job.seen_by_all.end = smaller(job.seen_by_all.end, next.seen_by_all.end);
    return true;
  }

  static void tile(State& t, const Job& job, [[maybe_unused]] const Job* next) {
    if constexpr (M::kOnePass) {
      if (!t.terms && t.a.drop_threshold == 0) return OnePass<T, M>(t).tile(job, next);
    }
    t.exact_tile(job);
  }

  static Job job_of(const State& t, const Strip& strip, int64_t j, int keys) {
    const auto [seen, seen_by_all] = strip.sight;
    Columns columns;
    columns.first = j;
    columns.from = static_cast<int>(larger(seen.begin - j, 0)) / M::kColumnAlign * M::kColumnAlign;
    columns.to = static_cast<int>(smaller(seen.end - j, keys));
    return {.row = strip.row,
            .rows = strip.rows,
            .columns = columns,
            .to_pad = round_up(columns.to, M::kColumnAlign),
            .seen_by_all = seen_by_all,
            .first = seen.begin >= j,
            .last = seen.end <= j + keys,
            .weights = t.s.weights};
  }

  static void pack_queries(State& t, const Job& job) {
    constexpr int kRowsAhead = 8;
    for (int r = job.row; r < job.row + job.rows; ++r) {
      if (r + kRowsAhead < job.row + job.rows) {
        prefetch_to_read(t.q_row(r + kRowsAhead), t.a.dim_qk);
      }
      M::pack_left_row(t.s.q, t.dq_pad, r, t.q_row(r), t.a.dim_qk, t.dq_pad);
    }
  }

  // Few rows: keys are read once, where they lie.
  static void stream(State& t, StreamBuffers& buffers) {
    constexpr int kStride = StreamBuffers::kStride;
    const Arguments& a = t.a;
    const int q_stride = round_up(a.dim_qk, 2 * kLanes);
    for (int r = 0; r < t.count; ++r) {
      stream_query(buffers.q + r * q_stride, t.q_row(r), a.dim_qk);
    }
    t.clear_sums(0, t.count);
    const KeyRange seen = t.sight_of(0, t.count).some;
    // From a multiple of 4, where dropout's counters step; a part without keys begins past the last
    // one.
    const int64_t part = t.task.key_begin;
    for (int64_t j = part + (seen.begin - part) / 4 * 4; j < seen.end; j += kStreamKeys) {
      const int keys = static_cast<int>(smaller(kStreamKeys, seen.end - j));
      const int padded = round_up(keys, 2 * kLanes);
      in_row_groups(t.count, [&]<int kRows>(int r) {
        stream_score_rows<kRows>(buffers.scores + r * kStride, kStride, buffers.q + r * q_stride,
                                 q_stride, t.k_row(j), a.k.strides.row, keys, a.dim_qk);
      });
      for (int r = 0; r < t.count; ++r) {
        float* const s = buffers.scores + r * kStride;
        for (int x = keys; x < padded; ++x) s[x] = kMinusInf;
        const Columns columns{j, 0, keys};
        t.softmax_row(r, t.largest_logit(r, s, columns, padded), s, columns, padded,
                      [=](int x, Vec p) {
                        const Vec hidden = broadcast(-1), least = broadcast(kLeastFloat);
                        store(s + x, where_less(load(s + x), least, hidden, p));
                      });
      }
      in_row_groups(t.count, [&]<int kRows>(int r) {
        stream_value_rows<kRows>(t.s.acc + int64_t{r} * t.dv_pad, t.dv_pad,
                                 buffers.scores + r * kStride, kStride, t.v_row(j), a.v.strides.row,
                                 keys, a.dim_v);
      });
    }
  }

  // Rows [row, row + rows) have met all their keys.
  static void finish(const State& t, int row, int rows) {
    if (t.task.partial != nullptr) return keep_partial(t, row, rows);
    const Arguments& a = t.a;
    for (int r = row; r < row + rows; ++r) {
      T* const out = t.out_row(r);
      const Vec inverse = broadcast(t.s.l[r] == 0 ? 0 : 1 / t.s.l[r]);
      for (int d = 0; d < a.dim_v; d += kLanes) {
        store_up_to(out + d, load(t.s.acc + int64_t{r} * t.dv_pad + d) * inverse, a.dim_v - d);
      }
    }
    if (a.lse.data == nullptr) return;
    for (int r = row; r < row + rows; r += kLanes) {
      const Vec lse = lse_of(load(t.s.m + r), load(t.s.l + r));
      for (int lane = 0; lane < kLanes && r + lane < row + rows; ++lane) {
        write_lse(a, t.head, t.s.rows[r + lane], lse[lane]);
      }
    }
  }

  static void keep_partial(const State& t, int row, int rows) {
    float* const p = t.task.partial;
    const int64_t sums = int64_t{t.count} * t.dv_pad;
    const int64_t begin = int64_t{row} * t.dv_pad, end = begin + int64_t{rows} * t.dv_pad;
    for (int64_t x = begin; x < end; x += kLanes) store(p + x, load(t.s.acc + x));
    for (int r = row; r < row + rows; ++r) {
      p[sums + r] = t.s.m[r];
      p[sums + t.count + r] = t.s.l[r];
    }
  }

  // From the max in log2 units and the sum of weights; a sum of 0 is that of a row that saw no key.
  static Vec lse_of(Vec m, Vec l) {
    const Vec lse = (m + log2(l)) * broadcast(kLn2);
    return where_less(l, broadcast(0x1p-126f), broadcast(kMinusInf), lse);
  }

  static void write_lse(const Arguments& a, const Head& head, const Row& row, float lse) {
    a.lse.at(head.sequence.batch_at, row.head, head.sequence.q_row + row.i) = lse;
  }
};

}  // namespace fovea::FOVEA_ISA
