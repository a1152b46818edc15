// The blocks of short sequences that hold keys, for dk and dv.
#pragma once

#include "backend/cuda/portable/backward/config.h"
#include "backend/cuda/portable/backward/ladder.cuh"
#include "backend/cuda/portable/backward/short_operands.cuh"
#include "backend/cuda/portable/backward/short_sums.cuh"

namespace fovea::cuda {

// Fragments have keys for rows and queries for columns, so that weights are at once the
// operand of the sums.
template <typename Shape>
class ShortKeys {
  using T = typename Shape::Element;
  static constexpr ShortConfig kC = Shape::kShort;
  static constexpr int kDim = kC.dim, kD = kDim / 16, kM = kC.key_m_tiles, kStages = kC.stages;
  using Operands = Operand<T, kDim>;
  using Queries = ShortQueries<T, kDim>;
  using Slots = SumSlots<kDim, kM>;
  static constexpr int kTileBytes = Queries::Tile::kBytes;
  static constexpr int kSlots = 2 * Slots::kCount;

 public:
  // Stages of queries, K, V.
  static constexpr int kWarpBytes = kStages * Queries::kBytes + 2 * kM * kTileBytes;
  static constexpr int kSumBytes = kC.warps * kSlots * 512;

  __device__ __forceinline__ ShortKeys(const BackwardArguments& a, int item)
      : a_(a), place_(a, item), key_(place_.rank * kC.key_tile()) {}

  __device__ __forceinline__ void run(unsigned char* memory) {
    const Problem& p = a_.p;
    const Sequence& s = place_.s;
    // Dense rows past a key length exist and get zeros; packed ones belong to the next sequence.
    const int stored = p.cu_q != nullptr ? s.kv_len : p.kv_len;
    if (key_ >= stored) return;
    tile::clear(dk_);
    tile::clear(dv_);
    walk(ptx::shared_address(memory) + threadIdx.x / 32 * kWarpBytes);
    float4 sums[kSlots];
    Slots::gather(sums, 0, dk_);
    Slots::gather(sums, Slots::kCount, dv_);
    add_up_warps<kC.warps>(memory, sums, [&](int slot, const float4& x) {
      const bool of_k = slot < Slots::kCount;
      const int key = key_ + Slots::row(slot % Slots::kCount);
      if (key >= stored) return;
      T* const to = rows_at<T>(of_k ? a_.dk : a_.dv, s, s.kv_row + key, place_.head_kv);
      Slots::store(to, slot, x, of_k ? p.scale : 1.0f, of_k ? p.dim_qk : p.dim_v);
    });
  }

 private:
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

  // Over the query rows that see the keys, of all heads, whose tiles the warps take in turns: the
  // next is on its way while one is worked on.
  __device__ __forceinline__ void walk(uint32_t shared) {
    const Problem& p = a_.p;
    const Sequence& s = place_.s;
    const int2 seeing = seeing_rows<int>(p, s, key_, min(key_ + kC.key_tile(), s.kv_len));
    const int2 clear = clear_rows<int>(p, s, key_, key_ + kC.key_tile());
    const int first = seeing.x / 16 * 16, rows = (seeing.y - first + 15) / 16 * 16;
    if (rows <= 0) return;
    const uint32_t s_k = shared + kStages * Queries::kBytes, s_v = s_k + kM * kTileBytes;
    load_keys(s_k, s_v);
    // Tiles that are left to this warp, to be loaded and to be worked on, and the first row of the
    // next; rows of all heads follow one another.
    const int warp = threadIdx.x / 32;
    int left = (rows / 16 * p.group + kC.warps - 1 - warp) / kC.warps, to_load = left;
    int row = first + 16 * warp, row_to_load = row;
    Queries queries(a_, s.batch_at, static_cast<int>(s.q_row) + row, place_.head_kv * p.group);
    const auto load_next = [&](uint32_t to) {
      if (--to_load >= 0) {
        for (; row_to_load >= first + rows; row_to_load -= rows) queries.move(-rows, 1);
        queries.load(to, s.q_len - row_to_load);
        queries.move(kC.warps * 16, 0);
        row_to_load += kC.warps * 16;
      }
      ptx::cp_async_commit();
    };
#pragma unroll 1
    for (int n = 0; n + 1 < kStages; ++n) load_next(shared + n * Queries::kBytes);
    ptx::cp_async_wait<kStages - 2>();
    __syncwarp();
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      k_[m].load_rows(s_k + m * kTileBytes);
      v_[m].load_rows(s_v + m * kTileBytes);
    }
    uint32_t at = shared, to = shared + (kStages - 1) * Queries::kBytes;
#pragma unroll 1
    for (; left > 0; --left) {
      for (; row >= first + rows;) row -= rows;
      add(at, row, row < clear.x || row + 16 > clear.y, [&] { load_next(to); });
      row += kC.warps * 16;
      ptx::cp_async_wait<kStages - 2>();
      __syncwarp();
      to = at;
      at = at + Queries::kBytes == s_k ? shared : at + Queries::kBytes;
    }
    ptx::cp_async_wait<0>();
  }

  __device__ __forceinline__ void load_keys(uint32_t s_k, uint32_t s_v) const {
    const Sequence& s = place_.s;
    const int row = static_cast<int>(s.kv_row) + key_;
    LaneRows<T, kDim> keys(a_.k, s.batch_at, row, place_.head_kv, a_.p.dim_qk);
    LaneRows<T, kDim> values(a_.v, s.batch_at, row, place_.head_kv, a_.p.dim_v);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      keys.load(s_k + m * kTileBytes, s.kv_len - key_ - 16 * m);
      values.load(s_v + m * kTileBytes, s.kv_len - key_ - 16 * m);
      keys.move(16, 0);
      values.move(16, 0);
    }
  }

  // `meanwhile`: what there is to do until operands have come.
  template <typename Task>
  __device__ __forceinline__ void add(uint32_t at, int row, bool masked, Task meanwhile) {
    Operands q, dout, out, q_deep, dout_deep;
    dout.load_columns(at + Queries::kDout);
    out.load_rows(at + Queries::kOut);
    q.load_columns(at);
    q_deep.load_deep(at);
    dout_deep.load_deep(at + Queries::kDout);
    meanwhile();
    float dots[2][2];
    dot_rows(dots, out, dout);
    RowStats stats[2][2];
    ptx::Fragment minus_delta[2];
    const ptx::Fragment zero = {0, 0, 0, 0};
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int n = x / 2, y = x % 2;
      stats[n][y] = Queries::stats(at, n * 8 + lane() % 4 * 2 + y, dots[n][y]);
      minus_delta[n][y] = minus_delta[n][2 + y] = -stats[n][y].delta;
    }
    if (masked && __any_sync(0xffffffffu, q.holds_nonfinite() || dout.holds_nonfinite())) {
      // Rows that are not finite must not meet the zero weights of keys that they do not see: they
      // are left out of the sums. Gradients of the scores that they see are not finite by
      // themselves, and weights are made so where dout is not finite.
      q_deep.leave_out_nonfinite();
      dout_deep.leave_out_nonfinite();
      mark_nonfinite(stats, dout);
    }
    ptx::Fragment weights[kM][2], scores[kM][2];
#pragma unroll
    for (int x = 0; x < 2 * kM; ++x) {
      const int m = x / 2, n = x % 2;
      // The products dout . v begin at -delta, which they are used with.
      multiply(weights[m][n], k_[m], q, n, zero);
      multiply(scores[m][n], v_[m], dout, n, minus_delta[n]);
#pragma unroll
      for (int y = 0; y < 4; ++y) {
        const Gradient g =
            plain_gradient_of(a_.p, weights[m][n][y], scores[m][n][y], stats[n][y % 2].lse2);
        weights[m][n][y] = g.weight;
        scores[m][n][y] = g.score;
      }
    }
    if (masked) hide_unseen(weights, scores, row);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      uint32_t p[4], ds[4];
      tile::pack_fragments<T>(p, weights[m][0], weights[m][1]);
      tile::pack_fragments<T>(ds, scores[m][0], scores[m][1]);
#pragma unroll
      for (int x = 0; x < 2 * kD; ++x) {
        const int d = x / 2, n = x % 2 * 2;
        ptx::mma_m16n8k16<T>(dv_[m][x], p, dout_deep.x[d][n], dout_deep.x[d][n + 1]);
        ptx::mma_m16n8k16<T>(dk_[m][x], ds, q_deep.x[d][n], q_deep.x[d][n + 1]);
      }
    }
  }

  // A NaN for the lse of rows whose dout is not finite.
  static __device__ __forceinline__ void mark_nonfinite(RowStats (&stats)[2][2],
                                                        const Operands& dout) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      uint32_t found = 0;
#pragma unroll
      for (int d = 0; d < kD; ++d) {
        found |= tile::nonfinite_bits<T>(dout.x[d][2 * n]) |
                 tile::nonfinite_bits<T>(dout.x[d][2 * n + 1]);
      }
      const uint32_t lanes = __ballot_sync(0xffffffffu, (found & tile::kNonfinite) != 0);
#pragma unroll
      for (int y = 0; y < 2; ++y) {
        const int r = lane() % 4 * 2 + y;  // four lanes each
        if ((lanes >> (4 * r) & 15) != 0) stats[n][y].lse2 = __uint_as_float(kBadDout);
      }
    }
  }

  __device__ __forceinline__ void hide_unseen(ptx::Fragment (&weights)[kM][2],
                                              ptx::Fragment (&scores)[kM][2], int row) const {
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int n = x / 2, y = x % 2;
      const ShortSight sight(a_.p, place_.s, row + n * 8 + lane() % 4 * 2 + y);
#pragma unroll
      for (int r = 0; r < 2 * kM; ++r) {
        const bool seen = sight.sees(key_ + r * 8 + lane() / 4);
        float& weight = weights[r / 2][n][r % 2 * 2 + y];
        float& score = scores[r / 2][n][r % 2 * 2 + y];
        weight = seen ? weight : 0.0f;
        score = seen ? score : 0.0f;
      }
    }
  }

  const BackwardArguments& a_;
  const ShortPlace place_;
  const int key_;  // the block's first
  Operands k_[kM], v_[kM];
  ptx::Fragment dk_[kM][2 * kD], dv_[kM][2 * kD];
};

}  // namespace fovea::cuda
