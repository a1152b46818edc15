// All three gradients in one pass, for heads so small that a warp holds its keys and values and
// their sums in registers with room to spare: what is left is to keep everything that is not a
// product out of the loop. A block holds a tile of keys of one KV head and walks over the query
// rows of its group that see them, Q and dO coming through two stages of shared memory. Fragments
// have keys for rows and queries for columns, so that weights are at once the operand of the sums.
#pragma once

#include <type_traits>

#include "backend/cuda/portable/backward/small_dq.cuh"
#include "backend/cuda/portable/backward/small_rows.cuh"
#include "prim/cuda/ptx/grid_dependency.cuh"

namespace fovea::cuda {

template <typename Shape>
class SmallKeyBlock {
  using T = typename Shape::Element;
  static constexpr BackwardConfig kC = Shape::kOnePass;
  static constexpr int kDim = kC.dim_qk, kD = kDim / 16, kM = kC.key_m_tiles;
  static constexpr int kTileKv = kC.key_tile(), kTileQ = kC.key_tile_q;
  static constexpr int kThreads = kC.key_threads();
  static_assert(kC.dim_v == kDim && kC.terms == Terms::kNone && sizeof(T) == 2);
  using Steps = Ladder<kTileKv, kTileQ>;
  using TileK = tile::SharedTile<T, kTileKv, kDim>;
  using Feed = SmallRows<Shape>;
  using TileQ = typename Feed::TileQ;
  using Dq = std::conditional_t<kC.dq_of_products, DqOfProducts<Shape>, DqOfScores<Shape>>;
  static constexpr int kDout = Feed::kDout, kStageBytes = Feed::kStageBytes;
  static constexpr int kKeys = BackwardConfig::kStages * kStageBytes;
  static constexpr int kDq = kKeys + (Dq::kKeepsKeys ? 2 * TileK::kBytes : 0);
  static_assert(kDq + Dq::kBytes <= kC.key_shared_bytes());

  // 16 query rows, as the products want them.
  struct Rows16 {
    uint32_t q[kD][4], dout[kD][4];  // depth along columns
    float2 lse2[2];
    ptx::Fragment delta[2];                    // of both keys of a lane: what products begin at
    uint32_t q_deep[kD][4], dout_deep[kD][4];  // depth along rows
  };
  // Where a lane finds the first of them in the stage at hand.
  struct Lanes {
    uint32_t columns[kD], rows[kD];
    uint32_t delta[2];  // twice the same: the compiler, not knowing it, reads what it would copy

    __device__ __forceinline__ void leave(int stage) {
      const int step = stage == 0 ? kStageBytes : -kStageBytes;
#pragma unroll
      for (int d = 0; d < kD; ++d) {
        columns[d] += step;
        rows[d] += step;
      }
      delta[0] += step;
      delta[1] += step;
    }
  };

 public:
  __device__ __forceinline__ SmallKeyBlock(const BackwardArguments& a, SmallPlace& place,
                                           uint32_t shared)
      : a_(a), place_(place), shared_(shared), feed_(a, place, shared) {}

  __device__ __forceinline__ void run() {
    // Every thread finds the place, so that keys are on their way before anybody waits. The kernel
    // before this one, of deltas, lets it begin when all before that have ended: only what that one
    // writes has to be waited for. Where there are no rows it is missing, and keys do not matter.
    const uint32_t s_k = shared_ + kKeys, s_v = s_k + TileK::kBytes;
    typename Feed::Cursor cursor{};
    int end;
    {
      SmallPlace place;
      if (a_.p.lengths_are_read()) ptx::wait_for_earlier_kernels();
      const int tile = a_.even.tiles > 0 ? Steps::find_even_place(a_, place)
                                         : Steps::find_place(a_, blockIdx.x, place);
      if (place.key_begin >= stored_keys(place)) {
        ptx::wait_for_earlier_kernels();
        return;
      }
      load_keys<T, TileK, kThreads>(s_k, a_.k, place, place.key_begin, place.s.kv_len, a_.p.dim_qk,
                                    a_.vector_k);
      load_keys<T, TileK, kThreads>(s_v, a_.v, place, place.key_begin, place.s.kv_len, a_.p.dim_v,
                                    a_.vector_v);
      place.clear = clear_rows(a_.p, place.s, place.key_begin, place.key_begin + kTileKv);
      const Flight flight = feed_.flight_from(place, tile);
      end = place.tile_end;
      ptx::wait_for_earlier_kernels();
      if (a_.row_parts > 1 && flight.first.tile >= end) {
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        return;
      }
      feed_.enter(cursor, flight, 0);
      if (threadIdx.x == 0) {
        static_cast<KeyPlace&>(place_) = place;
        place_.clear = place.clear;
        place_.flights[0] = flight;
      }
    }
    __syncthreads();
    if (cursor.tile < end) feed_.load_rows(cursor, 0);
    ptx::cp_async_commit();
    if (threadIdx.x == 0) feed_.find_flight(1);
    tile::clear(dk_);
    tile::clear(dv_);
    ptx::cp_async_wait<0>();
    __syncthreads();
    tile::rows_of_tile<TileK>(k_, s_k, first_key());
    tile::rows_of_tile<TileK>(v_, s_v, first_key());
    negate_values();
    const Dq dq(shared_ + kDq, s_k, first_key());
    Lanes lanes;
#pragma unroll
    for (int d = 0; d < kD; ++d) {
      lanes.columns[d] = held(shared_ + TileQ::Lane::columns_first().at(0, d * 16));
      lanes.rows[d] = held(shared_ + TileQ::Lane::rows_first().at(0, d * 16));
    }
    lanes.delta[0] = held(shared_ + Feed::kDelta + lane() % 4 * 8);
    lanes.delta[1] = __shfl_xor_sync(0xffffffffu, lanes.delta[0], 4);
    int before = -1, stage = 0;
    while (cursor.tile < end) {
      ptx::cp_async_wait<0>();
      __syncthreads();
      const int now = cursor.tile;
      const uint32_t flight = cursor.flight;
      const bool masked = cursor.masked;
      feed_.advance(cursor);
      if (cursor.tile < end) feed_.load_rows(cursor, 1 - stage);
      ptx::cp_async_commit();
      if (cursor.flight != flight && threadIdx.x == 0) feed_.find_flight(cursor.flight + 1);
      if (before >= 0) dq.flush(1 - stage, sums_of(before));
      // Warps that see all, or nothing, of a tile that is masked for others have it easier.
      const Seen seen = masked ? seen_by_warp(flight, stage) : Seen::kAll;
      if (seen == Seen::kAll) {
        step(dq, lanes, stage);
      } else {
        masked_step(dq, lanes, stage, seen == Seen::kNone);
      }
      before = now;
      lanes.leave(stage);
      stage = 1 - stage;
    }
    ptx::cp_async_wait<0>();
    __syncthreads();
    if (before >= 0) dq.flush(1 - stage, sums_of(before));
    put_sums();
  }

 private:
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  // This warp's first key, counted from the block's.
  static __device__ __forceinline__ int first_key() { return threadIdx.x / 32 * kM * 16; }

  // Products dout . -v begin at delta, as it is read: their sum is minus what weights are
  // multiplied by.
  __device__ __forceinline__ void negate_values() {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int x = 0; x < 4 * kD; ++x) v_[m][x / 4][x % 4] ^= 0x80008000u;
    }
  }

  // Dense rows past a key length exist and get zeros; packed ones belong to the next sequence.
  __device__ __forceinline__ int stored_keys(const Place& place) const {
    return a_.p.cu_q != nullptr ? place.s.kv_len : a_.p.kv_len;
  }
  __device__ __forceinline__ float* sums_of(int tile) const {
    return a_.dq_sum + (place_.sum_row + int64_t{tile} * kTileQ) * kDim;
  }

  static __device__ __forceinline__ int2 load_int2(uint32_t from) {
    const float2 x = tile::load_float2(from);
    return {__float_as_int(x.x), __float_as_int(x.y)};
  }

  // The next rows' fragments are on their way before dq's are stored, which no load passes.
  __device__ __forceinline__ void step(const Dq& dq, const Lanes& lanes, int stage) {
    Rows16 rows[2];
    load_fragments(rows[0], lanes, 0);
#pragma unroll
    for (int chunk = 0; chunk < kTileQ; chunk += 16) {
      if (chunk + 16 < kTileQ) {
        load_fragments(rows[(chunk / 16 + 1) % 2], lanes, chunk + 16);
      }
      add_rows<false>(dq, rows[chunk / 16 % 2], stage, chunk, {});
    }
  }

  // Of rows that do not see all keys, or may not, or see `nothing`.
  __device__ __forceinline__ void masked_step(const Dq& dq, const Lanes& lanes, int stage,
                                              bool nothing) {
    const Keys keys{place_.key_begin + first_key(), min(a_.p.prefix, place_.s.kv_len)};
#pragma unroll 1
    for (int chunk = 0; chunk < kTileQ; chunk += 16) {
      if (nothing) {
        dq.nothing(stage, chunk);
        continue;
      }
      Rows16 rows;
      load_fragments(rows, lanes, chunk);
      leave_out_nonfinite(rows);
      add_rows<true>(dq, rows, stage, chunk, keys);
    }
  }

  // This warp's first key, and the end of those that all rows see.
  struct Keys {
    int first, prefix;
  };
  enum class Seen { kNone, kSome, kAll };
  // How much of this warp's keys the rows of a masked tile see.
  __device__ __forceinline__ Seen seen_by_warp(uint32_t flight, int stage) const {
    const int begin = place_.key_begin + first_key(), end = begin + kM * 16;
    const int prefix = min(a_.p.prefix, place_.s.kv_len);
    if (begin >= place_.s.kv_len) return Seen::kNone;
    if (!place_.flights[flight % 4].first.one_head) return Seen::kSome;
    const uint32_t sights = shared_ + stage * kStageBytes + Feed::kSights;
    const int2 low = load_int2(sights), high = load_int2(sights + (kTileQ - 1) * 8);
    if ((high.y <= begin || low.x >= end) && prefix <= begin) return Seen::kNone;
    return (high.x <= begin && low.y >= end) || prefix >= end ? Seen::kAll : Seen::kSome;
  }

  // Rows of q or dout that are not finite must not meet the zero weights of keys that they do not
  // see: they are left out of the sums. Gradients of the scores that they see are not finite by
  // themselves, and weights are made so where delta tells of dout.
  __device__ __forceinline__ static void leave_out_nonfinite(Rows16& rows) {
    uint32_t found = 0;
#pragma unroll
    for (int x = 0; x < 4 * kD; ++x) {
      found |= tile::nonfinite_bits<T>(rows.q[x / 4][x % 4]) |
               tile::nonfinite_bits<T>(rows.dout[x / 4][x % 4]);
    }
    if (!__any_sync(0xffffffffu, (found & tile::kNonfinite) != 0)) return;
#pragma unroll
    for (int x = 0; x < 4 * kD; ++x) {
      rows.q_deep[x / 4][x % 4] = tile::finite_word<T>(rows.q_deep[x / 4][x % 4]);
      rows.dout_deep[x / 4][x % 4] = tile::finite_word<T>(rows.dout_deep[x / 4][x % 4]);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (__float_as_uint(rows.delta[n][0]) == kBadDout) rows.lse2[n].x = rows.delta[n][0];
      if (__float_as_uint(rows.delta[n][1]) == kBadDout) rows.lse2[n].y = rows.delta[n][1];
    }
  }

  __device__ __forceinline__ static void load_fragments(Rows16& x, const Lanes& lanes, int chunk) {
    const uint32_t at = chunk * (kDim * 2);
#pragma unroll
    for (int d = 0; d < kD; ++d) {
      ptx::ldmatrix_x4(x.q[d], lanes.columns[d] + at);
      ptx::ldmatrix_x4(x.dout[d], lanes.columns[d] + at + kDout);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t row = (chunk + n * 8) * 4;
      x.lse2[n] = tile::load_float2(lanes.delta[0] + row - (Feed::kDelta - Feed::kLse2));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 delta = tile::load_float2(lanes.delta[half] + row);
        x.delta[n][2 * half] = delta.x;
        x.delta[n][2 * half + 1] = delta.y;
      }
    }
#pragma unroll
    for (int d = 0; d < kD; ++d) {
      ptx::ldmatrix_x4_trans(x.dout_deep[d], lanes.rows[d] + at + kDout);
      ptx::ldmatrix_x4_trans(x.q_deep[d], lanes.rows[d] + at);
    }
  }

  // Which of a lane's keys, of each eight one, its rows see: of rows 8 n + 2 (lane % 4) and the
  // next the two lower bytes of seen[n].
  __device__ __forceinline__ void find_seen(uint32_t (&seen)[2], int stage, int chunk,
                                            const Keys& keys) const {
    static_assert(kM <= 4);
    const int first = keys.first + lane() / 4;
    const auto below = [&](int key) { return ptx::bits_below(min((key - first + 7) >> 3, 8)); };
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int row = chunk + x / 2 * 8 + lane() % 4 * 2 + x % 2;
      const int2 range = load_int2(shared_ + stage * kStageBytes + Feed::kSights + row * 8);
      const int prefix = range.y < 0 ? 0 : keys.prefix;  // -1: no row
      seen[x / 2] |= ((below(range.y) & ~below(range.x)) | below(prefix)) << (x % 2 * 8);
    }
  }

  template <bool kMasked>
  __device__ __forceinline__ void add_rows(const Dq& dq, const Rows16& rows, int stage, int chunk,
                                           const Keys& keys) {
    uint32_t seen[2] = {0, 0};
    if constexpr (kMasked) find_seen(seen, stage, chunk, keys);
    typename Dq::Part part;
    dq.begin(part);
    ptx::Fragment weights[2][2];
    if constexpr (kMasked) {
#pragma unroll
      for (int two = 0; two < kM; two += 2) {
        // 32 keys that no row sees are left out; to ask of 16 takes longer than it saves.
        const bool any = ((seen[0] | seen[1]) & (0x0f0f << (2 * two))) != 0;
        if (kC.dq_of_products && !__any_sync(0xffffffffu, any)) continue;
#pragma unroll
        for (int m = two; m < two + 2; ++m) {
          find_weights(weights[0], rows, m);
          add_unit<true>(dq, part, rows, m, weights[0], seen, stage, chunk);
        }
      }
    } else {
      // Exponentials of the next keys go before the products of these.
      find_weights(weights[0], rows, 0);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        if (m + 1 < kM) find_weights(weights[(m + 1) % 2], rows, m + 1);
        add_unit<false>(dq, part, rows, m, weights[m % 2], seen, stage, chunk);
      }
    }
    dq.end(part, stage, chunk);
  }

  __device__ __forceinline__ void find_weights(ptx::Fragment (&weights)[2], const Rows16& rows,
                                               int m) const {
    const ptx::Fragment zero = {0, 0, 0, 0};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      ptx::mma_m16n8k16<T>(weights[n], k_[m][0], rows.q[0][2 * n], rows.q[0][2 * n + 1], zero);
#pragma unroll
      for (int d = 1; d < kD; ++d) {
        ptx::mma_m16n8k16<T>(weights[n], k_[m][d], rows.q[d][2 * n], rows.q[d][2 * n + 1]);
      }
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const float lse2 = x % 2 == 0 ? rows.lse2[n].x : rows.lse2[n].y;
        weights[n][x] = plain_gradient_of(a_.p, weights[n][x], 0, lse2).weight;
      }
    }
  }

  // 16 rows and 16 keys.
  template <bool kMasked>
  __device__ __forceinline__ void add_unit(const Dq& dq, typename Dq::Part& part,
                                           const Rows16& rows, int m,
                                           const ptx::Fragment (&weights)[2],
                                           const uint32_t (&seen)[2], int stage, int chunk) {
    ptx::Fragment scores[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      ptx::mma_m16n8k16<T>(scores[n], v_[m][0], rows.dout[0][2 * n], rows.dout[0][2 * n + 1],
                           rows.delta[n]);
#pragma unroll
      for (int d = 1; d < kD; ++d) {
        ptx::mma_m16n8k16<T>(scores[n], v_[m][d], rows.dout[d][2 * n], rows.dout[d][2 * n + 1]);
      }
#pragma unroll
      for (int x = 0; x < 4; ++x) scores[n][x] = weights[n][x] * -scores[n][x];
    }
    uint32_t p[4], ds[4];
    tile::pack_fragments<T>(p, weights[0], weights[1]);
    tile::pack_fragments<T>(ds, scores[0], scores[1]);
    if constexpr (kMasked) {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const uint32_t shown = ptx::pair_mask(seen[x / 2] << (7 - (2 * m + x % 2)));
        p[x] &= shown;
        ds[x] &= shown;
      }
    }
#pragma unroll
    for (int d = 0; d < kD; ++d) {
      ptx::mma_m16n8k16<T>(dv_[m][2 * d], p, rows.dout_deep[d][0], rows.dout_deep[d][1]);
      ptx::mma_m16n8k16<T>(dv_[m][2 * d + 1], p, rows.dout_deep[d][2], rows.dout_deep[d][3]);
      ptx::mma_m16n8k16<T>(dk_[m][2 * d], ds, rows.q_deep[d][0], rows.q_deep[d][1]);
      ptx::mma_m16n8k16<T>(dk_[m][2 * d + 1], ds, rows.q_deep[d][2], rows.q_deep[d][3]);
    }
    dq.add(part, m, ds, stage, chunk);
  }

  __device__ __forceinline__ void put_sums() const {
    const int key = place_.key_begin + first_key(), keys = stored_keys(place_);
    if (a_.row_parts > 1) {
      const int64_t at = key_sum_row(a_.p, place_) + key;
      add_key_sums<kDim>(a_.dk_sum, at, keys - key, 0, dk_);
      add_key_sums<kDim>(a_.dv_sum, at, keys - key, 0, dv_);
    } else {
      store_key_rows<T>(a_.dk, place_, key, keys, dk_, a_.p.scale, a_.p.dim_qk, a_.vector_dk);
      store_key_rows<T>(a_.dv, place_, key, keys, dv_, 1, a_.p.dim_v, a_.vector_dv);
    }
  }

  const BackwardArguments& a_;
  SmallPlace& place_;
  const uint32_t shared_;
  Feed feed_;
  uint32_t k_[kM][kD][4], v_[kM][kD][4];
  ptx::Fragment dk_[kM][2 * kD], dv_[kM][2 * kD];
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kOnePass.key_threads(), Shape::kOnePass.key_blocks)
    backward_small_keys_kernel(const __grid_constant__ BackwardArguments a) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ SmallPlace place;
  SmallKeyBlock<Shape>(a, place, ptx::shared_address(memory)).run();
}

}  // namespace fovea::cuda
