// Products of floats: by exact multiply-adds, on the fragments that tensor cores have; and what is
// different about floats on tensor cores, as tf32.
#pragma once

#include "prim/cuda/ptx/math.cuh"
#include "prim/cuda/ptx/mma.cuh"
#include "prim/cuda/tile/shared_floats.cuh"

namespace fovea::tile {

__device__ __forceinline__ float finite(float x) { return x - x == 0 ? x : 0.0f; }

// As add_dot_rows and add_weighted_rows of products.cuh.
template <typename TileA, typename TileB, int kM, int kN>
__device__ __forceinline__ void add_dot_rows_exactly(ptx::Fragment (&c)[kM][kN], uint32_t s_a,
                                                     int row_a, uint32_t s_b, int row_b) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int d = 0; d < TileA::kChunks; ++d) {
    float4 a[2 * kM];
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      a[r] = load_float4(s_a + TileA::offset(row_a + r * 8 + lane / 4, d));
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int y = 0; y < 2; ++y) {
        const float4 b = load_float4(s_b + TileB::offset(row_b + n * 8 + lane % 4 * 2 + y, d));
#pragma unroll
        for (int r = 0; r < 2 * kM; ++r) {
          float& sum = c[r / 2][n][r % 2 * 2 + y];
          sum = fmaf(a[r].x, b.x, sum);
          sum = fmaf(a[r].y, b.y, sum);
          sum = fmaf(a[r].z, b.z, sum);
          sum = fmaf(a[r].w, b.w, sum);
        }
      }
    }
  }
}

template <typename TileB, int kM, int kK, int kN>
__device__ __forceinline__ void add_weighted_rows_exactly(ptx::Fragment (&sum)[kM][kN],
                                                          const ptx::Fragment (&weights)[kM][kK],
                                                          uint32_t s_b, int row_b, bool dirty) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < kK; ++k) {
    // Each of the four lanes that share a row holds two neighbouring columns of every eight. Not
    // unrolled where the code of two is long: it takes time to compile, and to fetch.
#pragma unroll kN> 8 ? 1 : 4
    for (int holder = 0; holder < 4; ++holder) {
#pragma unroll
      for (int y = 0; y < 2; ++y) {
        float w[2 * kM];
#pragma unroll
        for (int r = 0; r < 2 * kM; ++r) {
          w[r] = __shfl_sync(0xffffffffu, weights[r / 2][k][r % 2 * 2 + y], (lane & ~3) + holder);
        }
        const int row = row_b + k * 8 + holder * 2 + y;
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          float2 b = load_float2(s_b + TileB::offset(row, 2 * n) + lane % 4 * 8);
          if (dirty) b = {finite(b.x), finite(b.y)};
#pragma unroll
          for (int r = 0; r < 2 * kM; ++r) {
            sum[r / 2][n][r % 2 * 2] = fmaf(w[r], b.x, sum[r / 2][n][r % 2 * 2]);
            sum[r / 2][n][r % 2 * 2 + 1] = fmaf(w[r], b.y, sum[r / 2][n][r % 2 * 2 + 1]);
          }
        }
      }
    }
  }
}

// The same by tf32. A lane's two neighbouring weights of a row serve as columns lane % 4 and
// lane % 4 + 4 of the operand: depth may be counted in any order, if that of B is the same.
template <typename TileB, int kM, int kK, int kN>
__device__ __forceinline__ void add_weighted_rows_tf32(ptx::Fragment (&sum)[kM][kN],
                                                       const ptx::Fragment (&weights)[kM][kK],
                                                       uint32_t s_b, int row_b, bool dirty) {
  const typename TileB::DeepLane b_at;
#pragma unroll
  for (int k = 0; k < kK; ++k) {
    uint32_t a[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      a[m][0] = ptx::round_to_tf32(weights[m][k][0]);
      a[m][1] = ptx::round_to_tf32(weights[m][k][2]);
      a[m][2] = ptx::round_to_tf32(weights[m][k][1]);
      a[m][3] = ptx::round_to_tf32(weights[m][k][3]);
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      uint32_t b[2];
#pragma unroll
      for (int y = 0; y < 2; ++y) {
        const float x = load_float(s_b + b_at.at(row_b + k * 8, n * 8, y));
        b[y] = ptx::round_to_tf32(dirty ? finite(x) : x);
      }
#pragma unroll
      for (int m = 0; m < kM; ++m) ptx::mma_m16n8k8_tf32(sum[m][n], a[m], b[0], b[1]);
    }
  }
}

}  // namespace fovea::tile
