// Products of tiles whose channels are mixed in groups: only channels of the same group meet, so
// that a value that is not finite stays in its group. Groups are multiples of 8 channels.
#pragma once

#include "prim/cuda/tile/products.cuh"

namespace fovea::layers::cuda {

// The groups of a warp's blocks of eight columns.
template <int kN>
struct GroupsOfColumns {
  int first[kN];  // channel of the group
  unsigned width;

  __device__ GroupsOfColumns(int col, int group) : width(static_cast<unsigned>(group)) {
#pragma unroll
    for (int n = 0; n < kN; ++n) first[n] = (col + n * 8) / group * group;
  }
  __device__ __forceinline__ bool has(int n, int channel) const {
    return static_cast<unsigned>(channel - first[n]) < width;
  }
};

// As tile::add_dot_rows, the tiles' columns being channels from `channel` on.
template <typename T, typename Left, typename Right, int kM, int kN>
__device__ __forceinline__ void add_dots_in_groups(ptx::Fragment (&sum)[kM][kN], uint32_t s_left,
                                                   int row, uint32_t s_right, int col, int channel,
                                                   const GroupsOfColumns<kN>& groups) {
  static_assert(sizeof(T) == 2);
  const auto left_at = Left::Lane::rows_first();
  const auto right_at = Right::Lane::columns_first();
#pragma unroll
  for (int k = 0; k < Left::kCols; k += 16) {
    bool low[kN], high[kN], any = false;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      low[n] = groups.has(n, channel + k);
      high[n] = groups.has(n, channel + k + 8);
      any = any || low[n] || high[n];
    }
    if (!any) continue;
    uint32_t a[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) ptx::ldmatrix_x4(a[m], s_left + left_at.at(row + 16 * m, k));
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, s_right + right_at.at(col + n * 8, k));
#pragma unroll
      for (int y = 0; y < 2; ++y) {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          if (low[n + y] && high[n + y]) {
            ptx::mma_m16n8k16<T>(sum[m][n + y], a[m], b[2 * y], b[2 * y + 1]);
          } else if (low[n + y]) {
            ptx::mma_m16n8k8<T>(sum[m][n + y], a[m][0], a[m][1], b[2 * y]);
          } else if (high[n + y]) {
            ptx::mma_m16n8k8<T>(sum[m][n + y], a[m][2], a[m][3], b[2 * y + 1]);
          }
        }
      }
    }
  }
}

template <std::same_as<float> T, typename Left, typename Right, int kM, int kN>
__device__ __forceinline__ void add_dots_in_groups(ptx::Fragment (&sum)[kM][kN], uint32_t s_left,
                                                   int row, uint32_t s_right, int col, int channel,
                                                   const GroupsOfColumns<kN>& groups) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int k = 0; k < Left::kChunks; ++k) {
    float4 a[2 * kM];
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      a[r] = tile::load_float4(s_left + Left::offset(row + r * 8 + lane / 4, k));
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      if (!groups.has(n, channel + k * 4)) continue;
#pragma unroll
      for (int y = 0; y < 2; ++y) {
        const float4 b =
            tile::load_float4(s_right + Right::offset(col + n * 8 + lane % 4 * 2 + y, k));
#pragma unroll
        for (int r = 0; r < 2 * kM; ++r) {
          float& x = sum[r / 2][n][r % 2 * 2 + y];
          x = fmaf(a[r].x, b.x, fmaf(a[r].y, b.y, fmaf(a[r].z, b.z, fmaf(a[r].w, b.w, x))));
        }
      }
    }
  }
}

}  // namespace fovea::layers::cuda
