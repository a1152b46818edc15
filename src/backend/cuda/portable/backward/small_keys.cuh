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
    float2 lse2[2], delta[2];
    uint32_t q_deep[kD][4], dout_deep[kD][4];  // depth along rows
  };
  // What a lane adds to a stage to find them.
  struct Lanes {
    uint32_t columns[kD], rows[kD], stats;
    float minus_one;
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
    const Dq dq(shared_ + kDq, s_k, first_key());
    Lanes lanes;
#pragma unroll
    for (int d = 0; d < kD; ++d) {
      lanes.columns[d] = held(shared_ + TileQ::Lane::columns_first().at(0, d * 16));
      lanes.rows[d] = held(shared_ + TileQ::Lane::rows_first().at(0, d * 16));
    }
    lanes.stats = held(shared_ + Feed::kLse2 + lane() % 4 * 8);
    lanes.minus_one = copysignf(1.0f, -a_.p.scale);
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
    load_fragments(rows[0], lanes, stage, 0);
#pragma unroll
    for (int chunk = 0; chunk < kTileQ; chunk += 16) {
      if (chunk + 16 < kTileQ) load_fragments(rows[(chunk / 16 + 1) % 2], lanes, stage, chunk + 16);
      add_rows<false>(dq, rows[chunk / 16 % 2], lanes.minus_one, stage, chunk, {});
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
      load_fragments(rows, lanes, stage, chunk);
      leave_out_nonfinite(rows);
      add_rows<true>(dq, rows, lanes.minus_one, stage, chunk, keys);
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
      if (__float_as_uint(rows.delta[n].x) == kBadDout) rows.lse2[n].x = rows.delta[n].x;
      if (__float_as_uint(rows.delta[n].y) == kBadDout) rows.lse2[n].y = rows.delta[n].y;
    }
  }

  __device__ __forceinline__ static void load_fragments(Rows16& x, const Lanes& lanes, int stage,
                                                        int chunk) {
    const uint32_t at = stage * kStageBytes + chunk * (kDim * 2);
#pragma unroll
    for (int d = 0; d < kD; ++d) {
      ptx::ldmatrix_x4(x.q[d], lanes.columns[d] + at);
      ptx::ldmatrix_x4(x.dout[d], lanes.columns[d] + at + kDout);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t stats = lanes.stats + stage * kStageBytes + (chunk + n * 8) * 4;
      x.lse2[n] = tile::load_float2(stats);
      x.delta[n] = tile::load_float2(stats + kTileQ * 4);
    }
#pragma unroll
    for (int d = 0; d < kD; ++d) {
      ptx::ldmatrix_x4_trans(x.dout_deep[d], lanes.rows[d] + at + kDout);
      ptx::ldmatrix_x4_trans(x.q_deep[d], lanes.rows[d] + at);
    }
  }

  template <bool kMasked>
  __device__ __forceinline__ void add_rows(const Dq& dq, const Rows16& rows, float minus_one,
                                           int stage, int chunk, const Keys& keys) {
    // The products dout . v begin at -delta, which they are used with.
    ptx::Fragment minus_delta[2];
    const ptx::Fragment zero = {0, 0, 0, 0};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      // Four values of their own: two that were the same would be copied for every product.
      minus_delta[n][0] = -rows.delta[n].x;
      minus_delta[n][1] = -rows.delta[n].y;
      minus_delta[n][2] = rows.delta[n].x * minus_one;
      minus_delta[n][3] = rows.delta[n].y * minus_one;
    }
    const int key = keys.first + lane() / 4;
    Sight sights[2][2];
    if constexpr (kMasked) {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int row = chunk + x / 2 * 8 + lane() % 4 * 2 + x % 2;
        const int2 range = load_int2(shared_ + stage * kStageBytes + Feed::kSights + row * 8);
        sights[x / 2][x % 2] = {range.x, range.y, range.y < 0 ? 0 : keys.prefix};  // -1: no row
      }
    }
    typename Dq::Part part;
    dq.begin(part);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      ptx::Fragment weights[2], scores[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        ptx::mma_m16n8k16<T>(weights[n], k_[m][0], rows.q[0][2 * n], rows.q[0][2 * n + 1], zero);
        ptx::mma_m16n8k16<T>(scores[n], v_[m][0], rows.dout[0][2 * n], rows.dout[0][2 * n + 1],
                             minus_delta[n]);
#pragma unroll
        for (int d = 1; d < kD; ++d) {
          ptx::mma_m16n8k16<T>(weights[n], k_[m][d], rows.q[d][2 * n], rows.q[d][2 * n + 1]);
          ptx::mma_m16n8k16<T>(scores[n], v_[m][d], rows.dout[d][2 * n], rows.dout[d][2 * n + 1]);
        }
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          const Gradient g = plain_gradient_of(a_.p, weights[n][x], scores[n][x],
                                               x % 2 == 0 ? rows.lse2[n].x : rows.lse2[n].y);
          const bool seen = !kMasked || sights[n][x % 2].sees(key + m * 16 + x / 2 * 8);
          weights[n][x] = seen ? g.weight : 0.0f;
          scores[n][x] = seen ? g.score : 0.0f;
        }
      }
      const auto packed = [](const ptx::Fragment(&x)[2], uint32_t(&to)[4]) {
        to[0] = ptx::pack<T>(x[0][0], x[0][1]);
        to[1] = ptx::pack<T>(x[0][2], x[0][3]);
        to[2] = ptx::pack<T>(x[1][0], x[1][1]);
        to[3] = ptx::pack<T>(x[1][2], x[1][3]);
      };
      uint32_t p[4], ds[4];
      packed(weights, p);
      packed(scores, ds);
#pragma unroll
      for (int d = 0; d < kD; ++d) {
        ptx::mma_m16n8k16<T>(dv_[m][2 * d], p, rows.dout_deep[d][0], rows.dout_deep[d][1]);
        ptx::mma_m16n8k16<T>(dv_[m][2 * d + 1], p, rows.dout_deep[d][2], rows.dout_deep[d][3]);
        ptx::mma_m16n8k16<T>(dk_[m][2 * d], ds, rows.q_deep[d][0], rows.q_deep[d][1]);
        ptx::mma_m16n8k16<T>(dk_[m][2 * d + 1], ds, rows.q_deep[d][2], rows.q_deep[d][3]);
      }
      dq.add(part, m, ds, stage, chunk);
    }
    dq.end(part, stage, chunk);
  }

  __device__ __forceinline__ void put_sums() const {
    const int key = place_.key_begin + first_key(), keys = stored_keys(place_);
    if (a_.row_parts > 1) {
      const int64_t at = key_sum_row(a_.p, place_) + key;
      add_key_sums<kDim>(a_.dk_sum, at, keys - key, 0, dk_);
      add_key_sums<kDim>(a_.dv_sum, at, keys - key, 0, dv_);
    } else {
      store_key_rows<T>(a_.dk, place_, key, keys, 0, dk_, a_.p.scale, a_.p.dim_qk, a_.vector_dk);
      store_key_rows<T>(a_.dv, place_, key, keys, 0, dv_, 1, a_.p.dim_v, a_.vector_dv);
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
