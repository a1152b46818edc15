// dQ: a block holds a tile of query rows of one KV head and walks over the keys they see, as the
// forward pass does.
#pragma once

#include "backend/cuda/portable/backward/config.h"
#include "backend/cuda/portable/backward/element.cuh"
#include "prim/cuda/tile/products.cuh"

namespace fovea::cuda {

template <typename Shape>
class RowBlock {
  using T = typename Shape::Element;
  static constexpr BackwardConfig kC = Shape::kConfig;
  static constexpr int kM = kC.row_m_tiles, kTileQ = kC.row_tile(), kTileKv = kC.row_tile_kv;
  static constexpr int kThreads = kC.row_threads(), kChunk = kC.chunk, kN = kChunk / 8;
  static constexpr bool kAnyTerms = kC.terms == Terms::kAny;
  using TileQ = tile::SharedTile<T, kTileQ, kC.dim_qk>;
  using TileDout = tile::SharedTile<T, kTileQ, kC.dim_v>;
  using TileK = tile::SharedTile<T, kTileKv, kC.dim_qk>;
  using TileV = tile::SharedTile<T, kTileKv, kC.dim_v>;

 public:
  __device__ __forceinline__ RowBlock(const BackwardArguments& a, Place& place, uint32_t shared)
      : a_(a),
        place_(place),
        s_q_(shared),
        s_dout_(s_q_ + TileQ::kBytes),
        s_k_(s_dout_ + TileDout::kBytes),
        s_v_(s_k_ + 2 * TileK::kBytes) {}

  __device__ __forceinline__ void run() {
    const Problem& p = a_.p;
    if (threadIdx.x == 0) {
      const int tiles = (p.group * p.q_len + kTileQ - 1) / kTileQ;
      const int item = blockIdx.x;
      place_.b = item / tiles / p.head_kv;
      place_.head_kv = item / tiles % p.head_kv;
      place_.s = sequence_at(p, place_.b);
      place_.row = (tiles - 1 - item % tiles) * kTileQ;  // the longest first
      place_.rows = min(p.group * place_.s.q_len - place_.row, kTileQ);
      place_.span = RowSpan::at(place_.s, place_.row, max(place_.rows, 1));
    }
    __syncthreads();
    if (place_.rows <= 0) return;
    const KeyTiles keys =
        key_tiles(p, place_.s, place_.row, place_.rows, 0, place_.s.kv_len, kTileKv);
    load_rows();
    load_stats();
    tile::clear(dq_);
    const int count = keys.count();
    if (count > 0) load_keys(0, keys.tile(0) * kTileKv);
    ptx::cp_async_commit();
    for (int n = 0; n < count; ++n) {
      ptx::cp_async_wait<0>();
      __syncthreads();
      const int stage = n % 2, first = keys.tile(n) * kTileKv;
      if (n + 1 < count) load_keys(1 - stage, keys.tile(n + 1) * kTileKv);
      ptx::cp_async_commit();
      if (kAnyTerms || !keys.seen_by_all(first, first + kTileKv)) {
        step<true>(stage, first);
      } else {
        step<false>(stage, first);
      }
    }
    ptx::cp_async_wait<0>();
    store();
  }

 private:
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int row_in_tile(int r) {
    return (warp() * kM + r / 2) * 16 + r % 2 * 8 + lane() / 4;
  }

  __device__ __forceinline__ void load_rows() {
    const auto load = [&]<typename Tile>(Tile, const Rows& t, uint32_t shared, int cols,
                                         bool vector) {
      const T* const base = static_cast<const T*>(t.data) + place_.s.batch_at * t.batch +
                            place_.s.q_row * t.row +
                            static_cast<int64_t>(place_.head_kv * a_.p.group) * t.head;
      tile::TileLoader<T, Tile, kThreads>::fill(
          shared,
          [&](int r) {
            const Row row = place_.span.of(place_.s, r);
            return base + row.head * t.head + row.i * t.row;
          },
          place_.rows, cols, vector);
    };
    load(TileQ{}, a_.q, s_q_, a_.p.dim_qk, a_.vector_q);
    load(TileDout{}, a_.dout, s_dout_, a_.p.dim_v, a_.vector_dout);
  }

  __device__ __forceinline__ void load_keys(int stage, int first) {
    const int keys = place_.s.kv_len - first;
    const T* const k = static_cast<const T*>(a_.k.data) + place_.s.batch_at * a_.k.batch +
                       place_.head_kv * a_.k.head + (place_.s.kv_row + first) * a_.k.row;
    const T* const v = static_cast<const T*>(a_.v.data) + place_.s.batch_at * a_.v.batch +
                       place_.head_kv * a_.v.head + (place_.s.kv_row + first) * a_.v.row;
    tile::TileLoader<T, TileK, kThreads>::fill(
        s_k_ + stage * TileK::kBytes, [&](int r) { return k + r * a_.k.row; }, keys, a_.p.dim_qk,
        a_.vector_k);
    tile::TileLoader<T, TileV, kThreads>::fill(
        s_v_ + stage * TileV::kBytes, [&](int r) { return v + r * a_.v.row; }, keys, a_.p.dim_v,
        a_.vector_v);
  }

  __device__ __forceinline__ void load_stats() {
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      const int row = row_in_tile(r);
      stats_[r] = {kInfinity, 0};
      if (row >= place_.rows) continue;
      const Row which = place_.span.of(place_.s, row);
      const int64_t at =
          stat_index(a_, place_.s, place_.head_kv * a_.p.group + which.head, which.i);
      stats_[r] = {a_.lse2[at], a_.delta[at]};
    }
  }

  template <bool kMasked>
  __device__ __forceinline__ void step(int stage, int first) {
    const uint32_t s_k = s_k_ + stage * TileK::kBytes, s_v = s_v_ + stage * TileV::kBytes;
    bool dirty = false;
    if constexpr (kMasked) {
      dirty = __syncthreads_or(tile::holds_nonfinite<T, TileK>(s_k, kThreads));
    }
#pragma unroll 1
    for (int chunk = 0; chunk < kTileKv; chunk += kChunk) {
      ptx::Fragment weights[kM][kN], scores[kM][kN];
      tile::dot_rows<T, TileQ, TileK>(weights, s_q_, warp() * kM * 16, s_k, chunk);
      tile::dot_rows<T, TileDout, TileV>(scores, s_dout_, warp() * kM * 16, s_v, chunk);
      elements<kMasked>(weights, scores, first + chunk);
      tile::add_weighted_rows<T, TileK>(dq_, scores, s_k, chunk, dirty);
    }
  }

  template <bool kMasked>
  __device__ __forceinline__ void elements(ptx::Fragment (&weights)[kM][kN],
                                           ptx::Fragment (&scores)[kM][kN], int first) const {
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      Row which{};
      Sight sight{};
      TermRow terms{};
      if constexpr (kMasked) {
        which = place_.span.of(place_.s, row_in_tile(r));
        sight = sight_of(a_.p, place_.s, which.i);
      }
      const bool real = row_in_tile(r) < place_.rows;
      const int head = place_.head_kv * a_.p.group + (real ? which.head : 0);
      if (kAnyTerms) terms = term_row<T>(a_.p, place_.s, place_.b, head, which.i);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const int key = first + n * 8 + lane() % 4 * 2;
        float2 keep{1, 1};
        if (kAnyTerms && a_.p.drop_threshold != 0) {
          keep = keep_two(a_.p, place_.b * a_.p.head_q + head, which.i, key);
        }
#pragma unroll
        for (int y = 0; y < 2; ++y) {
          const float raw = weights[r / 2][n][r % 2 * 2 + y];
          float& ds = scores[r / 2][n][r % 2 * 2 + y];
          if (kMasked && !(real && sight.sees(key + y))) {
            ds = 0;
            continue;
          }
          const Gradient g = gradient_of<T, kAnyTerms>(a_.p, terms, key + y, raw, ds, stats_[r],
                                                       y == 0 ? keep.x : keep.y);
          ds = g.score;
        }
      }
    }
  }

  __device__ __forceinline__ void store() const {
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      const int row = row_in_tile(r);
      if (row >= place_.rows) continue;
      const Row which = place_.span.of(place_.s, row);
      T* const to = static_cast<T*>(a_.dq.data) + place_.s.batch_at * a_.dq.batch +
                    static_cast<int64_t>(place_.head_kv * a_.p.group + which.head) * a_.dq.head +
                    (place_.s.q_row + which.i) * a_.dq.row;
      tile::store_row(to, dq_[r / 2], r % 2 * 2, a_.p.scale, a_.p.dim_qk, a_.vector_dq);
    }
  }

  const BackwardArguments& a_;
  Place& place_;
  const uint32_t s_q_, s_dout_, s_k_, s_v_;
  RowStats stats_[2 * kM];
  ptx::Fragment dq_[kM][kC.dim_qk / 8];
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kConfig.row_threads(), Shape::kConfig.row_blocks)
    backward_rows_kernel(const __grid_constant__ BackwardArguments a) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ Place place;
  RowBlock<Shape>(a, place, ptx::shared_address(memory)).run();
}

}  // namespace fovea::cuda
