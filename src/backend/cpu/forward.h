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
    } else {
      M::begin();
      blocks(state);
      M::end();
    }
    finish(state);
  }

  static int64_t partial_floats(const Arguments& a, int64_t rows) {
    return rows * (State::Buffers::padded_v(a) + 2);
  }

  // Sums of `count` partials of the same rows, over different keys.
  static void join(const Arguments& a, const ForwardTask& task, const float* partials,
                   int64_t stride, int count) {
    const int64_t rows = task.row_end - task.row_begin;
    const int dv_pad = State::Buffers::padded_v(a);
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

  static void blocks(State& t) {
    for (int r = 0; r < t.count; ++r) {
      const Row& row = t.s.rows[r];
      const T* q = row_pointer<T>(t.a.q, t.head, row.head, row.i, t.head.sequence.q_row);
      M::pack_left_row(t.s.q, t.dq_pad, r, q, t.a.dim_qk, t.dq_pad);
    }
    const KeyRange all = t.sight_of(0, t.count).some;
    const int64_t begin = t.task.key_begin;
    for (int64_t j = begin + (all.begin - begin) / State::kTileKv * State::kTileKv; j < all.end;
         j += State::kTileKv) {
      const int keys = static_cast<int>(smaller(State::kTileKv, t.task.key_end - j));
      Job jobs[State::kMaxTiles];
      const int count = tiles_that_see(t, j, keys, jobs);
      if (count == 0) continue;
      t.pack_block(j, keys);
      if constexpr (M::kOnePass) {
        if (!t.terms && t.a.drop_threshold == 0) {
          for (int i = 0; i < count; ++i) OnePass<T, M>(t).tile(jobs[i]);
          continue;
        }
      }
      for (int i = 0; i < count; ++i) t.exact_tile(jobs[i]);
    }
  }

  static int tiles_that_see(const State& t, int64_t j, int keys, Job* jobs) {
    int count = 0;
    for (int r = 0; r < t.count; r += State::kTileQ) {
      const int rows = static_cast<int>(smaller(State::kTileQ, t.count - r));
      const auto [seen, seen_by_all] = t.sight_of(r, r + rows);
      if (seen.end <= j || seen.begin >= j + keys) continue;
      Columns columns;
      columns.first = j;
      columns.from =
          static_cast<int>(larger(seen.begin - j, 0)) / M::kColumnAlign * M::kColumnAlign;
      columns.to = static_cast<int>(smaller(seen.end - j, keys));
      jobs[count++] = {r,           rows,       columns, round_up(columns.to, M::kColumnAlign),
                       seen_by_all, t.s.weights};
    }
    return count;
  }

  // Few rows: keys are read once, where they lie.
  static void stream(State& t, StreamBuffers& buffers) {
    constexpr int kStride = StreamBuffers::kStride;
    const Arguments& a = t.a;
    const int q_stride = round_up(a.dim_qk, 2 * kLanes);
    for (int r = 0; r < t.count; ++r) {
      const Row& row = t.s.rows[r];
      const T* q = row_pointer<T>(a.q, t.head, row.head, row.i, t.head.sequence.q_row);
      stream_query(buffers.q + r * q_stride, q, a.dim_qk);
    }
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
        t.softmax_row(r, s, {j, 0, keys}, padded, [=](int x, Vec p) { store(s + x, p); });
      }
      in_row_groups(t.count, [&]<int kRows>(int r) {
        stream_value_rows<kRows>(t.s.acc + int64_t{r} * t.dv_pad, t.dv_pad,
                                 buffers.scores + r * kStride, kStride, t.v_row(j), a.v.strides.row,
                                 keys, a.dim_v);
      });
    }
  }

  static void finish(const State& t) {
    const Arguments& a = t.a;
    if (t.task.partial != nullptr) {
      float* const p = t.task.partial;
      const int64_t sums = int64_t{t.count} * t.dv_pad;
      for (int64_t x = 0; x < sums; x += kLanes) store(p + x, load(t.s.acc + x));
      for (int r = 0; r < t.count; ++r) {
        p[sums + r] = t.s.m[r];
        p[sums + t.count + r] = t.s.l[r];
      }
      return;
    }
    for (int r = 0; r < t.count; ++r) {
      const Row& row = t.s.rows[r];
      T* const out = row_pointer<T>(a.out, t.head, row.head, row.i, t.head.sequence.q_row);
      const Vec inverse = broadcast(t.s.l[r] == 0 ? 0 : 1 / t.s.l[r]);
      for (int d = 0; d < a.dim_v; d += kLanes) {
        store_up_to(out + d, load(t.s.acc + int64_t{r} * t.dv_pad + d) * inverse, a.dim_v - d);
      }
      write_lse(a, t.head, row, t.s.m[r], t.s.l[r]);
    }
  }

  static void write_lse(const Arguments& a, const Head& head, const Row& row, float m, float l) {
    if (a.lse.data == nullptr) return;
    a.lse.at(head.sequence.batch_at, row.head, head.sequence.q_row + row.i) =
        l == 0 ? kMinusInf : (m + __builtin_log2f(l)) * kLn2;
  }
};

}  // namespace fovea::FOVEA_ISA
