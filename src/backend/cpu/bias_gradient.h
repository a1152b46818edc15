// The gradient of the bias: one task owns one tile of it and sums the score gradients of every
// batch member, head and query that shares it, in a fixed order.
#pragma once

#include "backend/cpu/gradient_tile.h"

namespace fovea::FOVEA_ISA {

using cpu::BiasGradientTask;

template <typename T, typename M>
class BiasGradient {
 public:
  using Elem = typename M::Elem;
  using Tile = GradientTile<T, M>;

  static size_t scratch_bytes(const Arguments& a) {
    ScratchCounter counter;
    Buffers buffers(a, counter);
    return counter.bytes();
  }

  static void run(const Arguments& a, const BiasGradientTask& task, std::byte* scratch) {
    ScratchCarver carver(scratch);
    BiasGradient self(a, task, carver);
    M::begin();
    self.gather();
    M::end();
    self.write();
  }

 private:
  static constexpr int kTileQ = Tile::kTileQ;
  static constexpr int kTileKv = Tile::kTileKv;

  struct Buffers {
    float* total;    // [kTileQ][kTileKv], or one row of it when the queries share it
    Elem *q, *dout;  // left operands
    float *lse, *delta;
    std::byte* tile;

    template <typename Scratch>
    Buffers(const Arguments& a, Scratch& from) {
      total = from.template take<float>(int64_t{kTileQ} * kTileKv);
      q = from.template take<Elem>(int64_t{kTileQ} * round_up(a.dim_qk, M::kDepthAlign));
      dout = from.template take<Elem>(int64_t{kTileQ} * round_up(a.dim_v, M::kDepthAlign));
      lse = from.template take<float>(kTileQ);
      delta = from.template take<float>(kTileQ);
      tile = Tile::template reserve<Scratch>(a, from);
    }
  };

  BiasGradient(const Arguments& a, const BiasGradientTask& task, ScratchCarver& carver)
      : a_(a), task_(task), s_(a, carver) {
    for (int x = 0; x < kTileQ * kTileKv; x += kLanes) store(s_.total + x, zero());
  }

  void gather() {
    for (int64_t b = task_.b; b < task_.b + task_.b_count; ++b) {
      for (int64_t h = task_.head; h < task_.head + task_.head_count; ++h) {
        const Head head{task_.sequences[b], b, h / a_.group};
        const int64_t keys = smaller(task_.key_end, head.sequence.kv_len) - task_.key_begin;
        if (keys <= 0) continue;
        Tile tile(a_, head, s_.tile);
        bool packed = false;
        const int64_t q_end = smaller(task_.q_end, head.sequence.q_len);
        for (int64_t i = task_.q_begin; i < q_end; i += kTileQ) {
          const int rows = static_cast<int>(smaller(kTileQ, q_end - i));
          Columns columns;
          if (!tile.set_rows(h % a_.group, i, rows, task_.key_begin, static_cast<int>(keys),
                             columns))
            continue;
          if (!packed) tile.pack_keys(task_.key_begin, static_cast<int>(keys));
          packed = true;
          add_tile(tile, head, h, i, rows, columns);
        }
      }
    }
  }

  void add_tile(Tile& tile, const Head& head, int64_t h, int64_t i, int rows, Columns columns) {
    const Sequence& s = head.sequence;
    const int qk_depth = round_up(a_.dim_qk, M::kDepthAlign),
              v_depth = round_up(a_.dim_v, M::kDepthAlign);
    for (int r = 0; r < rows; ++r) {
      M::pack_left_row(s_.q, qk_depth, r, row_pointer<const T>(a_.q, head, h, i + r, s.q_row),
                       a_.dim_qk, qk_depth);
      M::pack_left_row(s_.dout, v_depth, r, row_pointer<const T>(a_.dout, head, h, i + r, s.q_row),
                       a_.dim_v, v_depth);
      s_.lse[r] = tile.lse_for_weights(a_.lse.at(s.batch_at, h, s.q_row + i + r));
      s_.delta[r] = a_.delta.at(s.batch_at, h, s.q_row + i + r);
    }
    tile.score_gradients(M::left(s_.q, qk_depth), M::left(s_.dout, v_depth), s_.lse, s_.delta,
                         columns);
    const bool shared_row = task_.strides.q == 0;
    for (int r = 0; r < rows; ++r) {
      float* const total = s_.total + (shared_row ? 0 : (i - task_.q_begin + r) * kTileKv);
      for (int j = columns.from; j < columns.to; ++j) total[j] += tile.score_gradient(r, j);
    }
  }

  void write() {
    const int64_t at =
        task_.b * task_.strides.batch + task_.head * task_.strides.head + task_.key_begin;
    const int keys = static_cast<int>(task_.key_end - task_.key_begin);
    const int64_t rows = task_.strides.q == 0 ? 1 : task_.q_end - task_.q_begin;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = at + (task_.q_begin + r) * task_.strides.q;
      for (int j = 0; j < keys; j += kLanes) {
        const Vec x = load(s_.total + r * kTileKv + j);
        if (task_.type == cpu::BiasType::kF32) {
          store_up_to(static_cast<float*>(task_.dbias) + row + j, x, keys - j);
        } else {
          store_up_to(static_cast<T*>(task_.dbias) + row + j, x, keys - j);
        }
      }
    }
  }

  const Arguments& a_;
  const BiasGradientTask& task_;
  Buffers s_;
};

}  // namespace fovea::FOVEA_ISA
