// Forward on tensor cores: a block holds a tile of query rows of one KV head and walks over the
// tiles of keys they see, K and V coming through two stages of shared memory.
#pragma once

#include "backend/cuda/portable/forward/config.h"
#include "backend/cuda/portable/forward/nonfinite.cuh"
#include "backend/cuda/portable/forward/softmax.cuh"
#include "backend/cuda/portable/terms.cuh"
#include "prim/cuda/tile/shared_tile.cuh"

namespace fovea::cuda {

template <typename T, typename Shape>
class ForwardBlock {
  static constexpr ForwardConfig kC = Shape::kConfig;
  static constexpr int kM = kC.m_tiles, kN = kC.chunk_kv / 8, kOut = kC.dim_v / 8;
  static constexpr int kDepth = kC.dim_qk / 16;
  static constexpr int kTileQ = kC.tile_q(), kTileKv = kC.tile_kv;
  static constexpr int kThreads = ForwardConfig::kThreads;
  using TileQ = tile::SharedTile<kTileQ, kC.dim_qk>;
  using TileK = tile::SharedTile<kTileKv, kC.dim_qk>;
  using TileV = tile::SharedTile<kTileKv, kC.dim_v>;
  using TileOut = tile::SharedTile<kTileQ, kC.dim_v>;
  static constexpr bool kAnyTerms = kC.terms == Terms::kAny;

 public:
  __device__ __forceinline__ ForwardBlock(const ForwardArguments& a, uint32_t shared)
      : a_(a), s_q_(shared), s_k_(shared + TileQ::kBytes), s_v_(s_k_ + 2 * TileK::kBytes) {}

  __device__ __forceinline__ void run() {
    find_place();
    if (rows_ <= 0) return;
    k_ = static_cast<const T*>(a_.k.data) + s_.batch_at * a_.k.batch + head_kv_ * a_.k.head +
         s_.kv_row * a_.k.row;
    v_ = static_cast<const T*>(a_.v.data) + s_.batch_at * a_.v.batch + head_kv_ * a_.v.head +
         s_.kv_row * a_.v.row;
    tiles_ = key_tiles(a_.p, s_, row_, rows_, key_begin_, key_end_, kTileKv);
    load_q();
    softmax_.start();
    start_sink();
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kOut; ++n) {
#pragma unroll
        for (int x = 0; x < 4; ++x) out_[m][n][x] = 0;
      }
    }
    const int count = key_end_ > key_begin_ ? tiles_.count() : 0;
    if (count > 0) load_kv(0, tiles_.tile(0));
    ptx::cp_async_commit();
    bool nonfinite = false;
    for (int n = 0; n < count; ++n) {
      ptx::cp_async_wait<0>();
      __syncthreads();
      if (n == 0) q_fragments();
      const int stage = n % 2;
      const int first = key_begin_ + tiles_.tile(n) * kTileKv;
      if (n + 1 < count) load_kv(1 - stage, tiles_.tile(n + 1));
      ptx::cp_async_commit();
      const bool all = tiles_.seen_by_all(first, first + kTileKv);
      if (!all || hides_by_terms()) {
        nonfinite |= hide_nonfinite<TileV, kThreads, T>(s_v_ + stage * TileV::kBytes);
      }
      tile(stage, first, !all);
    }
    ptx::cp_async_wait<0>();
    __syncthreads();  // the epilogue writes where the last tile was read
    find_place();     // again: kept through the loop it would cost registers
    softmax_.finish();
    if (a_.parts > 1) {
      store_partial();
    } else {
      store();
    }
    if (nonfinite) {
      __syncthreads();
      add_nonfinite<T>(a_, {b_, head_kv_, row_, rows_, key_begin_, key_end_}, s_,
                       a_.parts > 1 ? partial_row() : nullptr);
    }
  }

 private:
  // Which rows of which KV head, and which of its keys, are this block's.
  __device__ __forceinline__ void find_place() {
    const Problem& p = a_.p;
    // The last rows first: under a causal mask they are the longest.
    const int tiles = (p.group * p.q_len + kTileQ - 1) / kTileQ;
    const int item = blockIdx.x;
    row_ = (tiles - 1 - item % tiles) * kTileQ;
    head_kv_ = item / tiles % p.head_kv;
    b_ = item / tiles / p.head_kv;
    s_ = sequence_at(p, b_);
    rows_ = min(p.group * s_.q_len - row_, kTileQ);
    key_begin_ = blockIdx.y * a_.part_keys;
    key_end_ = min(key_begin_ + a_.part_keys, s_.kv_len);
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
    const T* const base =
        static_cast<const T*>(a_.q.data) + s_.batch_at * a_.q.batch + s_.q_row * a_.q.row +
        static_cast<int64_t>(head_kv_ * a_.p.group) * a_.q.head;
    tile::TileLoader<TileQ, kThreads, T>::fill(
        s_q_,
        [&](int r) {
          const Row row = Row::at(s_, row_ + r);
          return base + row.head * a_.q.head + row.i * a_.q.row;
        },
        rows_, a_.p.dim_qk, a_.vector_qk);
  }

  __device__ __forceinline__ void load_kv(int stage, int tile) {
    const int first = key_begin_ + tile * kTileKv;
    const int keys = key_end_ - first;
    const T* const k = k_ + first * a_.k.row;
    const T* const v = v_ + first * a_.v.row;
    tile::TileLoader<TileK, kThreads, T>::fill(
        s_k_ + stage * TileK::kBytes, [&](int r) { return k + r * a_.k.row; }, keys, a_.p.dim_qk,
        a_.vector_qk);
    tile::TileLoader<TileV, kThreads, T>::fill(
        s_v_ + stage * TileV::kBytes, [&](int r) { return v + r * a_.v.row; }, keys, a_.p.dim_v,
        a_.vector_v);
  }

  // A sink is a key with no value: it starts the sums, in the first part alone.
  __device__ __forceinline__ void start_sink() {
    if (a_.p.sink == nullptr || blockIdx.y != 0) return;
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      const int at = row_in_tile(r);
      if (at >= rows_) continue;
      const int head = head_kv_ * a_.p.group + Row::at(s_, row_ + at).head;
      const float logit = a_.p.sink[head * a_.p.sink_head] * kLog2e;
      if (logit == -kInfinity) continue;
      softmax_.reference[r] = logit;
      softmax_.sum[r] = lane() % 4 == 0 ? 1.0f : 0.0f;
    }
  }

  __device__ __forceinline__ void q_fragments() {
    if constexpr (kC.q_in_registers()) {
      const auto at = TileQ::Lane::rows_first();
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int d = 0; d < kDepth; ++d) {
          ptx::ldmatrix_x4(q_[m][d], s_q_ + at.at((warp() * kM + m) * 16, d * 16));
        }
      }
    }
  }

  __device__ __forceinline__ void tile(int stage, int first, bool masked) {
#pragma unroll 1
    for (int chunk = kTileKv - kC.chunk_kv; chunk >= 0; chunk -= kC.chunk_kv) {
      ptx::Fragment scores[kM][kN];
      multiply_scores(scores, s_k_ + stage * TileK::kBytes, chunk);
      if constexpr (kAnyTerms) apply_terms(scores, first + chunk);
      if (masked) hide_unseen(scores, first + chunk);
      softmax_.step(scores, out_, kAnyTerms ? kLog2e : a_.p.scale * kLog2e);
      if constexpr (kAnyTerms) {
        if (a_.p.drop_threshold != 0) drop(scores, first + chunk);
      }
      multiply_values(scores, s_v_ + stage * TileV::kBytes, chunk);
    }
  }

  __device__ __forceinline__ void multiply_scores(ptx::Fragment (&scores)[kM][kN], uint32_t s_k,
                                                  int chunk) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int x = 0; x < 4; ++x) scores[m][n][x] = 0;
      }
    }
    const auto k_at = TileK::Lane::columns_first();
    const auto q_at = TileQ::Lane::rows_first();
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      uint32_t q[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        if constexpr (kC.q_in_registers()) {
#pragma unroll
          for (int x = 0; x < 4; ++x) q[m][x] = q_[m][d][x];
        } else {
          ptx::ldmatrix_x4(q[m], s_q_ + q_at.at((warp() * kM + m) * 16, d * 16));
        }
      }
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        uint32_t k[4];
        ptx::ldmatrix_x4(k, s_k + k_at.at(chunk + n * 8, d * 16));
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          ptx::mma_m16n8k16<T>(scores[m][n], q[m], k[0], k[1]);
          ptx::mma_m16n8k16<T>(scores[m][n + 1], q[m], k[2], k[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void multiply_values(const ptx::Fragment (&weights)[kM][kN],
                                                  uint32_t s_v, int chunk) {
    const auto v_at = TileV::Lane::rows_first();
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t p[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        p[m][0] = ptx::pack<T>(weights[m][n][0], weights[m][n][1]);
        p[m][1] = ptx::pack<T>(weights[m][n][2], weights[m][n][3]);
        p[m][2] = ptx::pack<T>(weights[m][n + 1][0], weights[m][n + 1][1]);
        p[m][3] = ptx::pack<T>(weights[m][n + 1][2], weights[m][n + 1][3]);
      }
#pragma unroll
      for (int d = 0; d < kOut; d += 2) {
        uint32_t v[4];
        ptx::ldmatrix_x4_trans(v, s_v + v_at.at(chunk + n * 8, d * 8));
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          ptx::mma_m16n8k16<T>(out_[m][d], p[m], v[0], v[1]);
          ptx::mma_m16n8k16<T>(out_[m][d + 1], p[m], v[2], v[3]);
        }
      }
    }
  }

  // Calls body(row, m, x) for the lane's rows: x and x + 1 are its columns in fragments [m].
  template <typename Body>
  __device__ __forceinline__ void each_row(Body body) const {
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) body(Row::at(s_, row_ + row_in_tile(r)), r / 2, r % 2 * 2);
  }

  __device__ __forceinline__ void hide_unseen(ptx::Fragment (&scores)[kM][kN], int first) const {
    each_row([&](Row row, int m, int x) {
      const Sight sight = sight_of(a_.p, s_, row.i);
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
      const bool real = row.head < a_.p.group;
      const int head = head_kv_ * a_.p.group + (real ? row.head : 0);
      const TermRow terms = term_row<T>(a_.p, s_, b_, head, real ? row.i : 0);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const int key = first + n * 8 + lane() % 4 * 2;
#pragma unroll
        for (int y = 0; y < 2; ++y) {
          const int at = min(key + y, s_.kv_len - 1);
          scores[m][n][x + y] = logit<T>(a_.p, terms, at, scores[m][n][x + y], nullptr);
        }
      }
    });
  }

  __device__ __forceinline__ void drop(ptx::Fragment (&weights)[kM][kN], int first) const {
    each_row([&](Row row, int m, int x) {
      const int head = b_ * a_.p.head_q + head_kv_ * a_.p.group + row.head;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float2 keep = keep_two(a_.p, head, row.i, first + n * 8 + lane() % 4 * 2);
        weights[m][n][x] *= keep.x;
        weights[m][n][x + 1] *= keep.y;
      }
    });
  }

  __device__ __forceinline__ void store() {
    const auto at = [](int row, int col) { return TileOut::offset(row, col / 8) + col % 8 * 2; };
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      const int row = row_in_tile(r);
      const float sum = softmax_.sum[r], inverse = sum == 0 ? 0.0f : 1.0f / sum;
#pragma unroll
      for (int d = 0; d < kOut; ++d) {
        const uint32_t two = ptx::pack<T>(out_[r / 2][d][r % 2 * 2] * inverse,
                                          out_[r / 2][d][r % 2 * 2 + 1] * inverse);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(s_q_ + at(row, d * 8 + lane() % 4 * 2)),
                     "r"(two)
                     : "memory");
      }
      if (a_.lse.data != nullptr && lane() % 4 == 0 && row < rows_) {
        const Row which = Row::at(s_, row_ + row);
        const int head = head_kv_ * a_.p.group + which.head;
        a_.lse.data[s_.batch_at * a_.lse.batch + head * a_.lse.head +
                    (s_.q_row + which.i) * a_.lse.row] =
            sum == 0 ? -kInfinity : (softmax_.reference[r] + log2f(sum)) * kLn2;
      }
    }
    __syncwarp();  // a warp stores the rows that it wrote
    T* const base = static_cast<T*>(a_.out.data) + s_.batch_at * a_.out.batch +
                    s_.q_row * a_.out.row +
                    static_cast<int64_t>(head_kv_ * a_.p.group) * a_.out.head;
    constexpr int kRowsOfWarp = 16 * kM;
    for (int x = lane(); x < kRowsOfWarp * TileOut::kChunks; x += 32) {
      const int row = warp() * kRowsOfWarp + x / TileOut::kChunks, chunk = x % TileOut::kChunks;
      if (row >= rows_ || chunk * 8 >= a_.p.dim_v) continue;
      uint4 words;
      asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                   : "r"(s_q_ + TileOut::offset(row, chunk)));
      const Row which = Row::at(s_, row_ + row);
      T* const to = base + which.head * a_.out.head + which.i * a_.out.row + chunk * 8;
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
    return (blockIdx.y * heads + b_ * a_.p.head_kv + head_kv_) * all + row_;
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
      if (row >= rows_) continue;
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
  const uint32_t s_q_, s_k_, s_v_;
  Sequence s_;
  const T *k_, *v_;  // at key 0 of the sequence
  KeyTiles tiles_;
  int b_, head_kv_, row_, rows_, key_begin_, key_end_;
  RunningSoftmax<kM> softmax_;
  ptx::Fragment out_[kM][kOut];
  uint32_t q_[kC.q_in_registers() ? kM : 1][kC.q_in_registers() ? kDepth : 1][4];
};

template <typename T, typename Shape>
__global__ void __launch_bounds__(ForwardConfig::kThreads, Shape::kConfig.blocks)
    forward_kernel(const __grid_constant__ ForwardArguments a) {
  extern __shared__ __align__(128) unsigned char memory[];
  ForwardBlock<T, Shape>(a, ptx::shared_address(memory)).run();
}

}  // namespace fovea::cuda
