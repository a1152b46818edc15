// dbias: a block holds one tile of the bias and walks over everything that the tile was broadcast
// to (batch members, heads, query rows), always in the same order.
#pragma once

#include "backend/cuda/portable/backward/apart.h"
#include "backend/cuda/portable/backward/config.h"
#include "backend/cuda/portable/backward/element.cuh"
#include "backend/cuda/portable/backward/launch_blocks.cuh"
#include "backend/cuda/portable/loads.cuh"
#include "base/ceil_div.h"
#include "prim/cuda/ptx/grid_dependency.cuh"
#include "prim/cuda/tile/products.cuh"

namespace fovea::cuda {

template <typename T, int kDimQk, int kDimV>
class BiasBlock {
 public:
  static constexpr int kWarps = kDimQk * sizeof(T) > 512 ? 2 : 4, kThreads = 32 * kWarps;
  static constexpr int kTileQ = 16 * kWarps, kTileKv = kDimQk * sizeof(T) > 512 ? 16 : 32,
                       kChunks = kTileKv / 16;
  using TileQ = tile::SharedTile<T, kTileQ, kDimQk>;
  using TileDout = tile::SharedTile<T, kTileQ, kDimV>;
  using TileK = tile::SharedTile<T, kTileKv, kDimQk>;
  using TileV = tile::SharedTile<T, kTileKv, kDimV>;
  static constexpr int kBytes =
      TileQ::kBytes + TileDout::kBytes + TileK::kBytes + TileV::kBytes + kWarps * kTileKv * 4;

  __device__ __forceinline__ BiasBlock(const BackwardArguments& a, unsigned char* memory)
      : a_(a), column_sums_(reinterpret_cast<float*>(memory)) {
    s_q_ = ptx::shared_address(memory) + kWarps * kTileKv * 4;
    s_dout_ = s_q_ + TileQ::kBytes;
    s_k_ = s_dout_ + TileDout::kBytes;
    s_v_ = s_k_ + TileK::kBytes;
  }

  __device__ __forceinline__ void run() {
    const Problem& p = a_.p;
    const int key_tiles = (p.kv_len + kTileKv - 1) / kTileKv;
    const int row_tiles = a_.dbias_rows == 1 ? 1 : (p.q_len + kTileQ - 1) / kTileQ;
    int item = blockIdx.x;
    first_ = item % key_tiles * kTileKv;
    item /= key_tiles;
    const int row_tile = item % row_tiles;
    item /= row_tiles;
    const int head_at = item % a_.dbias_heads, batch_at = item / a_.dbias_heads;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int x = 0; x < 4; ++x) sum_[c][n][x] = 0;
      }
    }
    const int b_end = a_.dbias_batches == 1 ? a_.batch : batch_at + 1;
    const int head_end = a_.dbias_heads == 1 ? p.head_q : head_at + 1;
    for (int b = batch_at; b < b_end; ++b) {
      s_ = sequence_at(p, b);
      for (int head = head_at; head < head_end; ++head) {
        const int row_end = a_.dbias_rows == 1 ? s_.q_len : min(s_.q_len, (row_tile + 1) * kTileQ);
        for (int row = row_tile * kTileQ; row < row_end; row += kTileQ) add(b, head, row);
      }
    }
    if (a_.dbias_rows == 1) {
      store_columns(batch_at, head_at);
    } else {
      store(batch_at, head_at, row_tile * kTileQ);
    }
  }

 private:
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

  template <typename Tile>
  __device__ __forceinline__ void load(const Rows& t, uint32_t shared, int head, int64_t first,
                                       int rows, int cols, bool vector) {
    const T* const base = rows_at<const T>(t, s_, first, head);
    tile::TileLoader<T, Tile, kThreads>::fill_rows(
        shared, [&](int r) { return base + r * t.row; }, rows, cols, vector);
  }

  __device__ __forceinline__ void add(int b, int head, int row) {
    const Problem& p = a_.p;
    const int head_kv = head / p.group;
    __syncthreads();  // everybody is done with the tiles before
    load<TileQ>(a_.q, s_q_, head, s_.q_row + row, s_.q_len - row, p.dim_qk, a_.vector_q);
    load<TileDout>(a_.dout, s_dout_, head, s_.q_row + row, s_.q_len - row, p.dim_v, a_.vector_dout);
    load<TileK>(a_.k, s_k_, head_kv, s_.kv_row + first_, s_.kv_len - first_, p.dim_qk, a_.vector_k);
    load<TileV>(a_.v, s_v_, head_kv, s_.kv_row + first_, s_.kv_len - first_, p.dim_v, a_.vector_v);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    tile::TileLoader<T, TileQ, kThreads>::round(s_q_);
    tile::TileLoader<T, TileDout, kThreads>::round(s_dout_);
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      ptx::Fragment raw[1][2], dp[1][2];
      tile::dot_rows<T, TileQ, TileK>(raw, s_q_, warp() * 16, s_k_, c * 16);
      tile::dot_rows<T, TileDout, TileV>(dp, s_dout_, warp() * 16, s_v_, c * 16);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = row + warp() * 16 + half * 8 + lane() / 4;
        if (i >= s_.q_len) continue;
        const Sight sight = sight_of(p, s_, i);
        const TermRow terms = term_row<T>(p, s_, b, head, i);
        const int64_t at = stat_index(a_, s_, head, i);
        const RowStats stats{a_.lse2[at], a_.delta[at]};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int key = first_ + c * 16 + n * 8 + lane() % 4 * 2;
          float2 keep{1, 1};
          if (p.drop_threshold != 0) keep = keep_two(p, b * p.head_q + head, i, key);
#pragma unroll
          for (int y = 0; y < 2; ++y) {
            if (!sight.sees(key + y)) continue;
            sum_[c][n][2 * half + y] +=
                gradient_of<T>(p, terms, key + y, raw[0][n][2 * half + y], dp[0][n][2 * half + y],
                               stats, y == 0 ? keep.x : keep.y)
                    .bias;
          }
        }
      }
    }
  }

  __device__ __forceinline__ void put(int64_t row, int key, float value) const {
    if (key >= a_.p.kv_len) return;
    if (a_.dbias_is_f32) {
      static_cast<float*>(a_.dbias)[row + key] = value;
    } else {
      static_cast<T*>(a_.dbias)[row + key] = ptx::from_float<T>(value);
    }
  }

  __device__ __forceinline__ void store(int b, int head, int row) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row + warp() * 16 + half * 8 + lane() / 4;
      if (i >= a_.p.q_len) continue;
      const int64_t at = b * a_.dbias_batch + head * a_.dbias_head + i * a_.dbias_q;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int key = first_ + c * 16 + n * 8 + lane() % 4 * 2;
          put(at, key, sum_[c][n][2 * half]);
          put(at, key + 1, sum_[c][n][2 * half + 1]);
        }
      }
    }
  }

  // One row: the sums of all rows of the block.
  __device__ __forceinline__ void store_columns(int b, int head) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int y = 0; y < 2; ++y) {
          float total = sum_[c][n][y] + sum_[c][n][2 + y];
#pragma unroll
          for (int step = 4; step < 32; step *= 2) {
            total += __shfl_xor_sync(0xffffffffu, total, step);
          }
          if (lane() < 4) {
            column_sums_[warp() * kTileKv + c * 16 + n * 8 + lane() * 2 + y] = total;
          }
        }
      }
    }
    __syncthreads();
    if (threadIdx.x >= kTileKv) return;
    float total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += column_sums_[w * kTileKv + threadIdx.x];
    put(b * a_.dbias_batch + head * a_.dbias_head, first_ + threadIdx.x, total);
  }

  const BackwardArguments& a_;
  float* const column_sums_;  // [kWarps][kTileKv]
  uint32_t s_q_, s_dout_, s_k_, s_v_;
  Sequence s_;
  int first_;
  ptx::Fragment sum_[kChunks][2];
};

template <typename T, int kDimQk, int kDimV>
__global__ void __launch_bounds__(BiasBlock<T, kDimQk, kDimV>::kThreads, 2)
    backward_bias_kernel(const __grid_constant__ BackwardArguments a) {
  ptx::wait_for_earlier_kernels();
  extern __shared__ __align__(128) unsigned char memory[];
  BiasBlock<T, kDimQk, kDimV>(a, memory).run();
}

template <typename T, int kDimQk, int kDimV>
cudaError_t bias_gradient(const BackwardArguments& a, cudaStream_t stream) {
  using Block = BiasBlock<T, kDimQk, kDimV>;
  const int64_t row_tiles = a.dbias_rows == 1 ? 1 : ceil_div(a.p.q_len, Block::kTileQ);
  const int64_t blocks =
      int64_t{a.dbias_batches} * a.dbias_heads * row_tiles * ceil_div(a.p.kv_len, Block::kTileKv);
  return launch_blocks<backward_bias_kernel<T, kDimQk, kDimV>>(blocks, Block::kThreads,
                                                               Block::kBytes, stream, a);
}

}  // namespace fovea::cuda
