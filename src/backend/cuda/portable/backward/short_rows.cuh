// The blocks of short sequences that hold query rows, for dq.
#pragma once

#include "backend/cuda/portable/backward/config.h"
#include "backend/cuda/portable/backward/short_operands.cuh"
#include "backend/cuda/portable/backward/short_sums.cuh"

namespace fovea::cuda {

// Neighbouring warps hold the same rows of a head, the others those of the next head.
template <typename Shape>
class ShortRows {
  using T = typename Shape::Element;
  static constexpr ShortConfig kC = Shape::kShort;
  static constexpr int kDim = kC.dim, kD = kDim / 16, kM = kC.row_m_tiles, kStages = kC.stages;
  static constexpr int kSharing = kC.row_sharing;
  using Operands = Operand<T, kDim>;
  using Queries = ShortQueries<T, kDim>;
  using Slots = SumSlots<kDim, kM>;
  static constexpr int kTileBytes = Queries::Tile::kBytes;
  static constexpr int kSlots = Slots::kCount;

 public:
  // Queries, stages of K and V.
  static constexpr int kWarpBytes = kM * Queries::kBytes + kStages * 2 * kTileBytes;
  static constexpr int kSumBytes = kC.warps * kSlots * 512;

  __device__ __forceinline__ ShortRows(const BackwardArguments& a, int item)
      : a_(a), place_(a, item) {
    int head;
    const int tile = divide(
        a_.of_group, place_.rank * (kC.warps / kSharing) + threadIdx.x / 32 / kSharing, head);
    row_ = tile * kC.row_tile();
    head_q_ = place_.head_kv * a_.p.group + head;
  }

  __device__ __forceinline__ void run(unsigned char* memory) {
    const Sequence& s = place_.s;
    tile::clear(dq_);
    if (row_ < s.q_len) walk(ptx::shared_address(memory) + threadIdx.x / 32 * kWarpBytes);
    float4 sums[kSlots];
    Slots::gather(sums, 0, dq_);
    add_up_warps<kSharing>(memory, sums, [&](int slot, const float4& x) {
      const int row = row_ + Slots::row(slot);
      if (row >= s.q_len) return;
      Slots::store(rows_at<T>(a_.dq, s, s.q_row + row, head_q_), slot, x, a_.p.scale, a_.p.dim_qk);
    });
  }

 private:
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

  __device__ __forceinline__ void walk(uint32_t shared) {
    const Problem& p = a_.p;
    const Sequence& s = place_.s;
    Queries queries(a_, s.batch_at, static_cast<int>(s.q_row) + row_, head_q_);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      queries.load(shared + m * Queries::kBytes, s.q_len - row_ - 16 * m);
      queries.move(16, 0);
    }
    const RowSpan span{{0, row_}, row_, true};
    const KeyTiles tiles =
        key_tiles(p, s, span, min(kC.row_tile(), s.q_len - row_), 0, s.kv_len, 16);
    const int count = tiles.count(), share = threadIdx.x / 32 % kSharing;
    // Tiles of the prefix, and behind a gap those of the window.
    const auto first_key = [&](int n) {
      return (n < tiles.prefix ? n : n + tiles.first - tiles.prefix) * 16;
    };
    int key = first_key(share), to_load = share;
    const int first_row = static_cast<int>(s.kv_row) + key;
    LaneRows<T, kDim> keys(a_.k, s.batch_at, first_row, place_.head_kv, p.dim_qk);
    LaneRows<T, kDim> values(a_.v, s.batch_at, first_row, place_.head_kv, p.dim_v);
    const auto load_next = [&](uint32_t to) {
      if (to_load < count) {
        keys.load(to, s.kv_len - key);
        values.load(to + kTileBytes, s.kv_len - key);
        const int now = key;
        to_load += kSharing;
        key = first_key(to_load);
        keys.move(key - now, 0);
        values.move(key - now, 0);
      }
      ptx::cp_async_commit();
    };
    const uint32_t s_keys = shared + kM * Queries::kBytes;
#pragma unroll 1
    for (int n = 0; n + 1 < kStages; ++n) load_next(s_keys + n * 2 * kTileBytes);
    ptx::cp_async_wait<kStages - 2>();
    __syncwarp();
    take_rows(shared, share == 0);
    uint32_t at = s_keys, to = s_keys + (kStages - 1) * 2 * kTileBytes;
#pragma unroll 1
    for (int n = share; n < count; n += kSharing) {
      const int now = first_key(n);
      add(at, now, !tiles.seen_by_all(now, now + 16), [&] { load_next(to); });
      ptx::cp_async_wait<kStages - 2>();
      __syncwarp();
      to = at;
      at = at + 2 * kTileBytes == s_keys + kStages * 2 * kTileBytes ? s_keys : at + 2 * kTileBytes;
    }
    ptx::cp_async_wait<0>();
  }

  __device__ __forceinline__ void take_rows(uint32_t shared, bool first) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const uint32_t at = shared + m * Queries::kBytes;
      q_[m].load_rows(at);
      dout_[m].load_rows(at + Queries::kDout);
      Operands out, dout;
      out.load_rows(at + Queries::kOut);
      dout.load_columns(at + Queries::kDout);
      float dots[2][2];
      dot_rows(dots, out, dout);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // From columns to rows.
        const int r = lane() / 4, from = r / 2;
        const float even = __shfl_sync(0xffffffffu, dots[half][0], from);
        const float odd = __shfl_sync(0xffffffffu, dots[half][1], from);
        const int i = row_ + 16 * m + half * 8 + r;
        RowStats& stats = stats_[2 * m + half];
        stats = {kInfinity, 0};
        if (i >= place_.s.q_len) continue;
        stats = Queries::stats(at, half * 8 + r, r % 2 == 0 ? even : odd);
        // The gradient of the sink is summed after all rows.
        if (a_.dsink == nullptr || !first || lane() % 4 != 0) continue;
        const int64_t to = stat_index(a_, place_.s, head_q_, i);
        a_.lse2[to] = stats.lse2;
        a_.delta[to] = stats.delta;
      }
    }
  }

  template <typename Task>
  __device__ __forceinline__ void add(uint32_t at, int key, bool masked, Task meanwhile) {
    Operands k, v, k_deep;
    k.load_columns(at);
    v.load_columns(at + kTileBytes);
    k_deep.load_deep(at);
    meanwhile();
    // What sees a key that is not finite has a gradient that is not finite.
    if (masked && __any_sync(0xffffffffu, k.holds_nonfinite())) k_deep.leave_out_nonfinite();
    const ptx::Fragment zero = {0, 0, 0, 0};
    ptx::Fragment scores[kM][2];
#pragma unroll
    for (int x = 0; x < 2 * kM; ++x) {
      const int m = x / 2, n = x % 2;
      const float first = -stats_[2 * m].delta, second = -stats_[2 * m + 1].delta;
      ptx::Fragment weights;
      multiply(weights, q_[m], k, n, zero);
      multiply(scores[m][n], dout_[m], v, n, {first, first, second, second});
#pragma unroll
      for (int y = 0; y < 4; ++y) {
        const float lse2 = stats_[2 * m + y / 2].lse2;
        scores[m][n][y] = plain_gradient_of(a_.p, weights[y], scores[m][n][y], lse2).score;
      }
    }
    if (masked) hide_unseen(scores, key);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      uint32_t ds[4];
      tile::pack_fragments<T>(ds, scores[m][0], scores[m][1]);
#pragma unroll
      for (int x = 0; x < 2 * kD; ++x) {
        const int d = x / 2, n = x % 2 * 2;
        ptx::mma_m16n8k16<T>(dq_[m][x], ds, k_deep.x[d][n], k_deep.x[d][n + 1]);
      }
    }
  }

  __device__ __forceinline__ void hide_unseen(ptx::Fragment (&scores)[kM][2], int key) const {
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      const ShortSight sight(a_.p, place_.s, row_ + r * 8 + lane() / 4);
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const bool seen = sight.sees(key + x / 2 * 8 + lane() % 4 * 2 + x % 2);
        float& score = scores[r / 2][x / 2][r % 2 * 2 + x % 2];
        score = seen ? score : 0.0f;
      }
    }
  }

  const BackwardArguments& a_;
  const ShortPlace place_;
  int row_, head_q_;  // this warp's first
  RowStats stats_[2 * kM];
  Operands q_[kM], dout_[kM];
  ptx::Fragment dq_[kM][2 * kD];
};

}  // namespace fovea::cuda
