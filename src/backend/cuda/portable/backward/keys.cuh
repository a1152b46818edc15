// dK and dV: a block holds a tile of keys of one KV head and walks over the query rows of its group
// that see them, Q and dO coming through two stages of shared memory. Fragments have keys for rows
// and queries for columns, so that weights are at once the operand of the sums.
#pragma once

#include "backend/cuda/portable/backward/config.h"
#include "backend/cuda/portable/backward/element.cuh"
#include "prim/cuda/tile/products.cuh"

namespace fovea::cuda {

enum class KeySums { kBoth, kDk, kDv };

template <typename Shape, KeySums kSums>
class KeyBlock {
  using T = typename Shape::Element;
  static constexpr BackwardConfig kC = Shape::kConfig;
  static constexpr int kM = kC.key_m_tiles, kTileKv = kC.key_tile(), kTileQ = kC.key_tile_q;
  static constexpr int kThreads = kC.key_threads(), kChunk = kC.chunk, kN = kChunk / 8;
  static constexpr bool kAnyTerms = kC.terms == Terms::kAny;
  static constexpr bool kWantDk = kSums != KeySums::kDv, kWantDv = kSums != KeySums::kDk;
  using TileK = tile::SharedTile<T, kTileKv, kC.dim_qk>;
  using TileV = tile::SharedTile<T, kTileKv, kC.dim_v>;
  using TileQ = tile::SharedTile<T, kTileQ, kC.dim_qk>;
  using TileDout = tile::SharedTile<T, kTileQ, kC.dim_v>;

 public:
  __device__ __forceinline__ KeyBlock(const BackwardArguments& a, Place& place,
                                      unsigned char* memory)
      : a_(a), place_(place), stats_(reinterpret_cast<float*>(memory)) {
    s_stats_ = ptx::shared_address(memory);
    s_k_ = s_stats_ + BackwardConfig::kStages * kTileQ * 2 * 4;
    s_v_ = s_k_ + TileK::kBytes;
    s_q_ = s_v_ + TileV::kBytes;
    s_dout_ = s_q_ + 2 * TileQ::kBytes;
  }

  __device__ __forceinline__ void run() {
    const Problem& p = a_.p;
    if (threadIdx.x == 0) {
      const int tiles = (p.kv_len + kTileKv - 1) / kTileKv;
      const int item = blockIdx.x;
      place_.b = item / tiles / p.head_kv;
      place_.head_kv = item / tiles % p.head_kv;
      place_.key_begin = item % tiles * kTileKv;
      place_.s = sequence_at(p, place_.b);
    }
    __syncthreads();
    // Dense rows past a key length exist and get zeros; packed ones belong to the next sequence.
    const int stored = p.cu_q != nullptr ? place_.s.kv_len : p.kv_len;
    if (place_.key_begin >= stored) return;
    load_keys();
    if constexpr (kWantDk) tile::clear(dk_);
    if constexpr (kWantDv) tile::clear(dv_);
    const int row_tiles = (p.group * place_.s.q_len + kTileQ - 1) / kTileQ;
    int next = next_tile(0, row_tiles);
    if (next < row_tiles) load_rows(0, next);
    ptx::cp_async_commit();
    for (int n = 0; next < row_tiles; ++n) {
      const int tile = next, stage = n % 2;
      next = next_tile(tile + 1, row_tiles);
      ptx::cp_async_wait<0>();
      __syncthreads();
      if (next < row_tiles) load_rows(1 - stage, next);
      ptx::cp_async_commit();
      if (kAnyTerms || !seen_by_all(tile * kTileQ)) {
        step<true>(stage, tile * kTileQ);
      } else {
        step<false>(stage, tile * kTileQ);
      }
    }
    ptx::cp_async_wait<0>();
    store(stored);
  }

 private:
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

  // Rows [row, row + kTileQ) of the group, the first and the last sight among them.
  struct Sights {
    Sight low, high;
    bool whole;  // kTileQ rows
  };
  __device__ __forceinline__ Sights sights_of(int row) const {
    const int last = min(row + kTileQ, a_.p.group * place_.s.q_len) - 1;
    const Row from = Row::at(place_.s, row), to = Row::at(place_.s, last);
    const bool one_head = from.head == to.head;
    return {sight_of(a_.p, place_.s, one_head ? from.i : 0),
            sight_of(a_.p, place_.s, one_head ? to.i : place_.s.q_len - 1),
            last == row + kTileQ - 1};
  }
  __device__ __forceinline__ int next_tile(int tile, int tiles) const {
    for (; tile < tiles; ++tile) {
      const Sights span = sights_of(tile * kTileQ);
      if (span.high.end > place_.key_begin && span.low.begin < place_.key_begin + kTileKv)
        return tile;
      if (span.low.prefix > place_.key_begin) return tile;
    }
    return tiles;
  }

  __device__ __forceinline__ void load_keys() {
    const int keys = place_.s.kv_len - place_.key_begin;
    const T* const k = static_cast<const T*>(a_.k.data) + place_.s.batch_at * a_.k.batch +
                       place_.head_kv * a_.k.head + (place_.s.kv_row + place_.key_begin) * a_.k.row;
    const T* const v = static_cast<const T*>(a_.v.data) + place_.s.batch_at * a_.v.batch +
                       place_.head_kv * a_.v.head + (place_.s.kv_row + place_.key_begin) * a_.v.row;
    tile::TileLoader<T, TileK, kThreads>::fill(
        s_k_, [&](int r) { return k + r * a_.k.row; }, keys, a_.p.dim_qk, a_.vector_k);
    tile::TileLoader<T, TileV, kThreads>::fill(
        s_v_, [&](int r) { return v + r * a_.v.row; }, keys, a_.p.dim_v, a_.vector_v);
  }

  __device__ __forceinline__ void load_rows(int stage, int tile) {
    const int first = tile * kTileQ, rows = a_.p.group * place_.s.q_len - first;
    const RowSpan span = RowSpan::at(place_.s, first, min(rows, kTileQ));
    const auto load = [&]<typename Tile>(Tile, const Rows& t, uint32_t shared, int cols,
                                         bool vector) {
      const T* const base = static_cast<const T*>(t.data) + place_.s.batch_at * t.batch +
                            place_.s.q_row * t.row +
                            static_cast<int64_t>(place_.head_kv * a_.p.group) * t.head;
      tile::TileLoader<T, Tile, kThreads>::fill(
          shared + stage * Tile::kBytes,
          [&](int r) {
            const Row row = span.of(place_.s, r);
            return base + row.head * t.head + row.i * t.row;
          },
          rows, cols, vector);
    };
    load(TileQ{}, a_.q, s_q_, a_.p.dim_qk, a_.vector_q);
    load(TileDout{}, a_.dout, s_dout_, a_.p.dim_v, a_.vector_dout);
    const uint32_t stats = s_stats_ + stage * 2 * kTileQ * 4;
    for (int r = threadIdx.x; r < kTileQ; r += kThreads) {
      const Row which = span.of(place_.s, r < rows ? r : 0);
      const int64_t at =
          stat_index(a_, place_.s, place_.head_kv * a_.p.group + which.head, which.i);
      const int bytes = r < rows ? 4 : 0;  // rows past the last are masked
      ptx::cp_async_4(stats + r * 4, a_.lse2 + at, bytes);
      ptx::cp_async_4(stats + (kTileQ + r) * 4, a_.delta + at, bytes);
    }
  }

  // Whether every row of a tile sees every key of the block.
  __device__ __forceinline__ bool seen_by_all(int row) const {
    const Sights sights = sights_of(row);
    const int begin = place_.key_begin, end = begin + kTileKv;
    return sights.whole &&
           ((sights.high.begin <= begin && sights.low.end >= end) || sights.low.prefix >= end);
  }

  // kMasked is known at compile time: what it costs would otherwise be paid by every tile.
  template <bool kMasked>
  __device__ __forceinline__ void step(int stage, int row) {
    bool dirty = false;
    if constexpr (kMasked) {
      dirty = tile::holds_nonfinite<T, TileQ>(s_q_ + stage * TileQ::kBytes, kThreads);
      dirty |= tile::holds_nonfinite<T, TileDout>(s_dout_ + stage * TileDout::kBytes, kThreads);
      dirty = __syncthreads_or(dirty);
    }
#pragma unroll 1
    for (int chunk = 0; chunk < kTileQ; chunk += kChunk) {
      const uint32_t s_q = s_q_ + stage * TileQ::kBytes;
      const uint32_t s_dout = s_dout_ + stage * TileDout::kBytes;
      ptx::Fragment weights[kM][kN], scores[kM][kN];
      tile::dot_rows<T, TileK, TileQ>(weights, s_k_, warp() * kM * 16, s_q, chunk);
      tile::dot_rows<T, TileV, TileDout>(scores, s_v_, warp() * kM * 16, s_dout, chunk);
      elements<kMasked>(weights, scores, stage, row + chunk, chunk, dirty);
      if constexpr (kWantDv)
        tile::add_weighted_rows<T, TileDout>(dv_, weights, s_dout, chunk, dirty);
      if constexpr (kWantDk) tile::add_weighted_rows<T, TileQ>(dk_, scores, s_q, chunk, dirty);
    }
  }

  // From products q . k and dout . v to weights and gradients of scores.
  template <bool kMasked>
  __device__ __forceinline__ void elements(ptx::Fragment (&weights)[kM][kN],
                                           ptx::Fragment (&scores)[kM][kN], int stage, int row,
                                           int chunk, bool dirty) const {
    const float* const stats = stats_ + stage * 2 * kTileQ + chunk;
    RowSpan span{};
    if constexpr (kMasked) span = RowSpan::at(place_.s, row, kChunk);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int y = 0; y < 2; ++y) {
        const int column = n * 8 + lane() % 4 * 2 + y;
        const RowStats of_row{stats[column], stats[kTileQ + column]};
        Row which{};
        Sight sight{};
        TermRow terms{};
        bool real = true;
        if constexpr (kMasked) {
          which = span.of(place_.s, column);
          real = which.head < a_.p.group;
          sight = sight_of(a_.p, place_.s, which.i);
          if (kAnyTerms) {
            const int head = place_.head_kv * a_.p.group + (real ? which.head : 0);
            terms = term_row<T>(a_.p, place_.s, place_.b, head, which.i);
          }
        }
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int key = place_.key_begin + (warp() * kM + m) * 16 + half * 8 + lane() / 4;
            float& w = weights[m][n][2 * half + y];
            float& ds = scores[m][n][2 * half + y];
            if (kMasked && !(real && sight.sees(key))) {
              w = ds = 0;
              continue;
            }
            float keep = 1;
            if (kAnyTerms && a_.p.drop_threshold != 0) {
              const float2 two =
                  keep_two(a_.p, place_.b * a_.p.head_q + place_.head_kv * a_.p.group + which.head,
                           which.i, key & ~1);
              keep = key % 2 == 0 ? two.x : two.y;
            }
            const Gradient g = gradient_of<T, kAnyTerms>(a_.p, terms, key, w, ds, of_row, keep);
            // Rows of dout that are not finite were left out of the products: delta tells of them.
            w = dirty ? g.weight + 0 * of_row.delta : g.weight;
            ds = g.score;
          }
        }
      }
    }
  }

  __device__ __forceinline__ void store(int stored) const {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = place_.key_begin + (warp() * kM + m) * 16 + half * 8 + lane() / 4;
        if (key >= stored) continue;
        const auto row = [&](const Rows& t) {
          return static_cast<T*>(t.data) + place_.s.batch_at * t.batch + place_.head_kv * t.head +
                 (place_.s.kv_row + key) * t.row;
        };
        if constexpr (kWantDk) {
          tile::store_row(row(a_.dk), dk_[m], 2 * half, a_.p.scale, a_.p.dim_qk, a_.vector_dk);
        }
        if constexpr (kWantDv) {
          tile::store_row(row(a_.dv), dv_[m], 2 * half, 1, a_.p.dim_v, a_.vector_dv);
        }
      }
    }
  }

  const BackwardArguments& a_;
  Place& place_;
  float* const stats_;  // [stage][lse2, delta][kTileQ]
  uint32_t s_stats_, s_k_, s_v_, s_q_, s_dout_;
  ptx::Fragment dk_[kM][kWantDk ? kC.dim_qk / 8 : 1];
  ptx::Fragment dv_[kM][kWantDv ? kC.dim_v / 8 : 1];
};

template <typename Shape, int kSums>
__global__ void __launch_bounds__(Shape::kConfig.key_threads(), Shape::kConfig.key_blocks)
    backward_keys_kernel(const __grid_constant__ BackwardArguments a) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ Place place;
  KeyBlock<Shape, static_cast<KeySums>(kSums)>(a, place, memory).run();
}

}  // namespace fovea::cuda
