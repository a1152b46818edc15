// Forward on tensor cores: a block holds a tile of query rows of one KV head and walks over the
// tiles of keys they see, K and V coming through two stages of shared memory.
#pragma once

#include "backend/cuda/portable/forward/config.h"
#include "backend/cuda/portable/forward/nonfinite.cuh"
#include "backend/cuda/portable/forward/softmax.cuh"
#include "backend/cuda/portable/terms.cuh"
#include "prim/cuda/tile/products.cuh"

namespace fovea::cuda {

template <typename Shape>
class ForwardBlock {
  using T = typename Shape::Element;
  static constexpr ForwardConfig kC = Shape::kConfig;
  static constexpr int kM = kC.m_tiles, kN = kC.chunk_kv / 8, kOut = kC.dim_v / 8;
  static constexpr int kTileQ = kC.tile_q(), kTileKv = kC.tile_kv;
  static constexpr int kThreads = kC.threads();
  using TileQ = tile::SharedTile<T, kTileQ, kC.dim_qk>;
  using TileK = tile::SharedTile<T, kTileKv, kC.dim_qk>;
  using TileV = tile::SharedTile<T, kTileKv, kC.dim_v>;
  using TileOut = tile::SharedTile<T, kTileQ, kC.dim_v>;
  static constexpr bool kAnyTerms = kC.terms == Terms::kAny;

 public:
  __device__ __forceinline__ ForwardBlock(const ForwardArguments& a, Place& place, uint32_t shared)
      : a_(a),
        place_(place),
        s_q_(shared),
        s_k_(shared + TileQ::kBytes),
        s_v_(s_k_ + 2 * TileK::kBytes) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) place_ = find_place();
    __syncthreads();
    if (place_.rows <= 0) return;
    const Sequence s = place_.s;
    const int key_begin = place_.key_begin, key_end = place_.key_end;
    k_ = static_cast<const T*>(a_.k.data) + s.batch_at * a_.k.batch + place_.head_kv * a_.k.head +
         (s.kv_row + key_begin) * a_.k.row;
    v_ = static_cast<const T*>(a_.v.data) + s.batch_at * a_.v.batch + place_.head_kv * a_.v.head +
         (s.kv_row + key_begin) * a_.v.row;
    const KeyTiles tiles = key_tiles(a_.p, s, place_.row, place_.rows, key_begin, key_end, kTileKv);
    load_q();
    softmax_.start();
    start_sink();
    tile::clear(out_);
    const int count = key_end > key_begin ? tiles.count() : 0;
    if (count > 0) load_kv(0, tiles.tile(0) * kTileKv);
    ptx::cp_async_commit();
    bool nonfinite = false;
    for (int n = 0; n < count; ++n) {
      ptx::cp_async_wait<0>();
      __syncthreads();
      const int stage = n % 2;
      const int first = key_begin + tiles.tile(n) * kTileKv;
      if (n + 1 < count) load_kv(1 - stage, tiles.tile(n + 1) * kTileKv);
      ptx::cp_async_commit();
      const bool all = tiles.seen_by_all(first, first + kTileKv);
      if (!all || hides_by_terms()) {
        nonfinite |= hide_nonfinite<T, TileV, kThreads>(s_v_ + stage * TileV::kBytes);
      }
      tile(stage, first, !all);
    }
    ptx::cp_async_wait<0>();
    __syncthreads();  // the epilogue writes where the last tile was read
    softmax_.finish();
    if (a_.parts > 1) {
      store_partial();
    } else {
      store();
    }
    if (nonfinite) {
      __syncthreads();
      add_nonfinite<T>(a_, place_, a_.parts > 1 ? partial_row() : nullptr);
    }
  }

 private:
  __device__ __forceinline__ Place find_place() const {
    const Problem& p = a_.p;
    // The last rows first: under a causal mask they are the longest.
    const int tiles = (p.group * p.q_len + kTileQ - 1) / kTileQ;
    const int item = blockIdx.x;
    Place place;
    place.row = (tiles - 1 - item % tiles) * kTileQ;
    place.head_kv = item / tiles % p.head_kv;
    place.b = item / tiles / p.head_kv;
    place.s = sequence_at(p, place.b);
    place.rows = min(p.group * place.s.q_len - place.row, kTileQ);
    place.span = RowSpan::at(place.s, place.row, max(place.rows, 1));
    place.key_begin = blockIdx.y * a_.part_keys;
    place.key_end = min(place.key_begin + a_.part_keys, place.s.kv_len);
    return place;
  }

  static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  // Row in the tile of index r of this lane's 2 * kM rows.
  static __device__ __forceinline__ int row_in_tile(int r) {
    return (warp() * kM + r / 2) * 16 + r % 2 * 8 + lane() / 4;
  }

  __device__ __forceinline__ bool hides_by_terms() const {
    return kAnyTerms && (a_.p.bias.data != nullptr || a_.p.bool_mask.data != nullptr);
  }

  __device__ __forceinline__ void load_q() {
    const T* const base = static_cast<const T*>(a_.q.data) + place_.s.batch_at * a_.q.batch +
                          place_.s.q_row * a_.q.row +
                          static_cast<int64_t>(place_.head_kv * a_.p.group) * a_.q.head;
    tile::TileLoader<T, TileQ, kThreads>::fill(
        s_q_,
        [&](int r) {
          const Row row = place_.span.of(place_.s, r);
          return base + row.head * a_.q.head + row.i * a_.q.row;
        },
        place_.rows, a_.p.dim_qk, a_.vector_qk);
  }

  // Keys from `first` on, counted from the part's first.
  __device__ __forceinline__ void load_kv(int stage, int first) {
    const int keys = place_.key_end - place_.key_begin - first;
    const T* const k = k_ + first * a_.k.row;
    const T* const v = v_ + first * a_.v.row;
    tile::TileLoader<T, TileK, kThreads>::fill(
        s_k_ + stage * TileK::kBytes, [&](int r) { return k + r * a_.k.row; }, keys, a_.p.dim_qk,
        a_.vector_qk);
    tile::TileLoader<T, TileV, kThreads>::fill(
        s_v_ + stage * TileV::kBytes, [&](int r) { return v + r * a_.v.row; }, keys, a_.p.dim_v,
        a_.vector_v);
  }

  // A sink is a key with no value: it starts the sums, in the first part alone.
  __device__ __forceinline__ void start_sink() {
    if (a_.p.sink == nullptr || blockIdx.y != 0) return;
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      const int at = row_in_tile(r);
      if (at >= place_.rows) continue;
      const int head = place_.head_kv * a_.p.group + place_.span.of(place_.s, at).head;
      const float logit = a_.p.sink[head * a_.p.sink_head] * kLog2e;
      if (logit == -kInfinity) continue;
      softmax_.reference[r] = logit;
      softmax_.sum[r] = lane() % 4 == 0 ? 1.0f : 0.0f;
    }
  }

  __device__ __forceinline__ void tile(int stage, int first, bool masked) {
#pragma unroll 1
    for (int chunk = kTileKv - kC.chunk_kv; chunk >= 0; chunk -= kC.chunk_kv) {
      ptx::Fragment scores[kM][kN];
      tile::dot_rows<T, TileQ, TileK>(scores, s_q_, warp() * kM * 16, s_k_ + stage * TileK::kBytes,
                                      chunk);
      if constexpr (kAnyTerms) apply_terms(scores, first + chunk);
      if (masked) hide_unseen(scores, first + chunk);
      softmax_.step(scores, out_, kAnyTerms ? kLog2e : a_.p.scale * kLog2e);
      if constexpr (kAnyTerms) {
        if (a_.p.drop_threshold != 0) drop(scores, first + chunk);
      }
      tile::add_weighted_rows<T, TileV>(out_, scores, s_v_ + stage * TileV::kBytes, chunk, false);
    }
  }

  // Calls body(row, m, x) for the lane's rows: x and x + 1 are its columns in fragments [m].
  template <typename Body>
  __device__ __forceinline__ void each_row(Body body) const {
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r)
      body(place_.span.of(place_.s, row_in_tile(r)), r / 2, r % 2 * 2);
  }

  __device__ __forceinline__ void hide_unseen(ptx::Fragment (&scores)[kM][kN], int first) const {
    each_row([&](Row row, int m, int x) {
      const Sight sight = sight_of(a_.p, place_.s, row.i);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const int key = first + n * 8 + lane() % 4 * 2;
        if (!sight.sees(key)) scores[m][n][x] = -kInfinity;
        if (!sight.sees(key + 1)) scores[m][n][x + 1] = -kInfinity;
      }
    });
  }

  __device__ __forceinline__ void apply_terms(ptx::Fragment (&scores)[kM][kN], int first) const {
    each_row([&](Row row, int m, int x) {
      const bool real = row.head < a_.p.group && row.i < place_.s.q_len;
      const int head = place_.head_kv * a_.p.group + (real ? row.head : 0);
      const TermRow terms = term_row<T>(a_.p, place_.s, place_.b, head, real ? row.i : 0);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const int key = first + n * 8 + lane() % 4 * 2;
#pragma unroll
        for (int y = 0; y < 2; ++y) {
          const int at = min(key + y, place_.s.kv_len - 1);
          scores[m][n][x + y] = logit<T>(a_.p, terms, at, scores[m][n][x + y], nullptr);
        }
      }
    });
  }

  __device__ __forceinline__ void drop(ptx::Fragment (&weights)[kM][kN], int first) const {
    each_row([&](Row row, int m, int x) {
      const int head = place_.b * a_.p.head_q + place_.head_kv * a_.p.group + row.head;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float2 keep = keep_two(a_.p, head, row.i, first + n * 8 + lane() % 4 * 2);
        weights[m][n][x] *= keep.x;
        weights[m][n][x + 1] *= keep.y;
      }
    });
  }

  __device__ __forceinline__ void store() {
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      const int row = row_in_tile(r);
      const float sum = softmax_.sum[r], inverse = sum == 0 ? 0.0f : 1.0f / sum;
      if constexpr (sizeof(T) == 4) {
        if (row < place_.rows) {
          tile::store_row(out_row(row), out_[r / 2], r % 2 * 2, inverse, a_.p.dim_v, a_.vector_out);
        }
      } else {
        stage_row(r, inverse);
      }
      if (a_.lse.data != nullptr && lane() % 4 == 0 && row < place_.rows) {
        const Row which = place_.span.of(place_.s, row);
        const int head = place_.head_kv * a_.p.group + which.head;
        a_.lse.data[place_.s.batch_at * a_.lse.batch + head * a_.lse.head +
                    (place_.s.q_row + which.i) * a_.lse.row] =
            sum == 0 ? -kInfinity : (softmax_.reference[r] + log2f(sum)) * kLn2;
      }
    }
    if constexpr (sizeof(T) == 2) {
      __syncwarp();  // a warp stores the rows that it staged
      store_staged();
    }
  }

  __device__ __forceinline__ T* out_row(int row) const {
    const Row which = place_.span.of(place_.s, row);
    return static_cast<T*>(a_.out.data) + place_.s.batch_at * a_.out.batch +
           static_cast<int64_t>(place_.head_kv * a_.p.group + which.head) * a_.out.head +
           (place_.s.q_row + which.i) * a_.out.row;
  }

  // 16-bit outputs pass through the shared memory of Q, to be written 16 bytes at a time.
  __device__ __forceinline__ void stage_row(int r, float scale) {
#pragma unroll
    for (int d = 0; d < kOut; ++d) {
      const uint32_t two =
          ptx::pack<T>(out_[r / 2][d][r % 2 * 2] * scale, out_[r / 2][d][r % 2 * 2 + 1] * scale);
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(s_q_ + TileOut::offset(row_in_tile(r), d) +
                                                   lane() % 4 * 4),
                   "r"(two)
                   : "memory");
    }
  }

  __device__ __forceinline__ void store_staged() const {
    constexpr int kRowsOfWarp = 16 * kM;
    for (int x = lane(); x < kRowsOfWarp * TileOut::kChunks; x += 32) {
      const int row = warp() * kRowsOfWarp + x / TileOut::kChunks, chunk = x % TileOut::kChunks;
      if (row >= place_.rows || chunk * 8 >= a_.p.dim_v) continue;
      uint4 words;
      asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                   : "r"(s_q_ + TileOut::offset(row, chunk)));
      T* const to = out_row(row) + chunk * 8;
      if (a_.vector_out) {
        *reinterpret_cast<uint4*>(to) = words;
      } else {
        const uint32_t w[4] = {words.x, words.y, words.z, words.w};
        for (int y = 0; y < 8 && chunk * 8 + y < a_.p.dim_v; ++y) {
          reinterpret_cast<uint16_t*>(to)[y] = static_cast<uint16_t>(w[y / 2] >> (y % 2 * 16));
        }
      }
    }
  }

  // Rows of partial results: [part][KV head][row of the group].
  __device__ __forceinline__ int64_t partial_index() const {
    const int64_t all = static_cast<int64_t>(a_.p.group) * a_.p.q_len;
    const int64_t heads = gridDim.x / ((all + kTileQ - 1) / kTileQ);
    return (blockIdx.y * heads + place_.b * a_.p.head_kv + place_.head_kv) * all + place_.row;
  }
  __device__ __forceinline__ float* partial_row() const {
    return a_.partial + partial_index() * a_.p.dim_v;
  }

  // Unnormalised sums, their reference max and sum of weights, for the merge.
  __device__ __forceinline__ void store_partial() {
    const int64_t first = partial_index();
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      const int row = row_in_tile(r);
      if (row >= place_.rows) continue;
      float* const to = partial_row() + static_cast<int64_t>(row) * a_.p.dim_v;
#pragma unroll
      for (int d = 0; d < kOut; ++d) {
        const int col = d * 8 + lane() % 4 * 2;
        if (col < a_.p.dim_v) to[col] = out_[r / 2][d][r % 2 * 2];
        if (col + 1 < a_.p.dim_v) to[col + 1] = out_[r / 2][d][r % 2 * 2 + 1];
      }
      if (lane() % 4 == 0) {
        a_.partial_stats[first + row] = make_float2(softmax_.reference[r], softmax_.sum[r]);
      }
    }
  }

  const ForwardArguments& a_;
  Place& place_;
  const uint32_t s_q_, s_k_, s_v_;
  const T *k_, *v_;  // at the part's first key
  RunningSoftmax<kM> softmax_;
  ptx::Fragment out_[kM][kOut];
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), Shape::kConfig.blocks)
    forward_kernel(const __grid_constant__ ForwardArguments a) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ Place place;
  ForwardBlock<Shape>(a, place, ptx::shared_address(memory)).run();
}

}  // namespace fovea::cuda
