// dQ: a block holds a tile of query rows of one KV head and walks over the keys they see, as the
// forward pass does.
#pragma once

#include "backend/cuda/portable/backward/config.h"
#include "backend/cuda/portable/backward/element.cuh"
#include "backend/cuda/portable/loads.cuh"
#include "prim/cuda/ptx/grid_dependency.cuh"
#include "prim/cuda/tile/products.cuh"
#include "prim/cuda/tile/staged_rows.cuh"

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
        key_tiles(p, place_.s, place_.span, place_.rows, 0, place_.s.kv_len, kTileKv);
    load_rows();
    load_stats();
    tile::clear(dq_);
    const int count = keys.count();
    // A turn before the first tile brings it.
#pragma unroll 1
    for (int n = -1; n < count; ++n) {
      if (n >= 0) {
        ptx::cp_async_wait<0>();
        if (n == 0) round_rows();
        __syncthreads();
      }
      if (n + 1 < count) load_stage((n + 1) % 2, keys.tile(n + 1) * kTileKv);
      ptx::cp_async_commit();
      if (n < 0) continue;
      const int stage = n % 2, first = keys.tile(n) * kTileKv;
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

  __device__ __forceinline__ void load_rows() {
    load_queries<T, TileQ, kThreads>(s_q_, a_.q, place_, a_.p.group, place_.span, place_.rows,
                                     a_.p.dim_qk, a_.vector_q);
    load_queries<T, TileDout, kThreads>(s_dout_, a_.dout, place_, a_.p.group, place_.span,
                                        place_.rows, a_.p.dim_v, a_.vector_dout);
  }

  __device__ __forceinline__ void round_rows() const {
    tile::TileLoader<T, TileQ, kThreads>::round(s_q_);
    tile::TileLoader<T, TileDout, kThreads>::round(s_dout_);
  }

  __device__ __forceinline__ void load_stage(int stage, int first) {
    load_keys<T, TileK, kThreads>(s_k_ + stage * TileK::kBytes, a_.k, place_, first,
                                  place_.s.kv_len, a_.p.dim_qk, a_.vector_k);
    load_keys<T, TileV, kThreads>(s_v_ + stage * TileV::kBytes, a_.v, place_, first,
                                  place_.s.kv_len, a_.p.dim_v, a_.vector_v);
  }

  __device__ __forceinline__ void load_stats() {
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      const int row = row_in_tile<kM>(r);
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
      start_from_delta(scores);
      tile::add_dot_rows<T, TileDout, TileV>(scores, s_dout_, warp() * kM * 16, s_v, chunk);
      elements<kMasked>(weights, scores, first + chunk);
      tile::add_weighted_rows<T, TileK>(dq_, scores, s_k, chunk, dirty);
    }
  }

  // The products dout . v begin at -delta, which they are used with.
  __device__ __forceinline__ void start_from_delta(ptx::Fragment (&scores)[kM][kN]) const {
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      const float start = kAnyTerms ? 0.0f : -stats_[r].delta;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        scores[r / 2][n][r % 2 * 2] = scores[r / 2][n][r % 2 * 2 + 1] = start;
      }
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
        which = place_.span.of(place_.s, row_in_tile<kM>(r));
        sight = sight_of(a_.p, place_.s, which.i);
      }
      const bool real = row_in_tile<kM>(r) < place_.rows;
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
          const Gradient g = kAnyTerms ? gradient_of<T>(a_.p, terms, key + y, raw, ds, stats_[r],
                                                        y == 0 ? keep.x : keep.y)
                                       : plain_gradient_of(a_.p, raw, ds, stats_[r].lse2);
          ds = g.score;
        }
      }
    }
  }

  // Through the memory of the queries, which nobody reads any more.
  __device__ __forceinline__ void store() const {
    __syncthreads();
    tile::stage_rows<T, TileQ>(s_q_, warp() * kM * 16, 0, dq_, [&](int) { return a_.p.scale; });
    __syncthreads();
    tile::store_staged_rows<T, TileQ, kThreads>(
        s_q_, place_.rows, a_.p.dim_qk, a_.vector_dq, [&](int row) {
          const Row which = place_.span.of(place_.s, row);
          return rows_at<T>(a_.dq, place_.s, place_.s.q_row + which.i,
                            place_.head_kv * a_.p.group + which.head);
        });
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
  ptx::wait_for_earlier_kernels();
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ Place place;
  RowBlock<Shape>(a, place, ptx::shared_address(memory)).run();
}

}  // namespace fovea::cuda
