// One step of a product over taps: rows of the left tile, moved by a tap, times rows of the right.
#pragma once

#include "prim/cuda/tile/products.cuh"

namespace fovea::layers::cuda {

// The groups of a warp's blocks of eight columns. Only channels of the same group meet, so that a
// value that is not finite stays in its group. Groups are multiples of 8 channels.
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

// Lanes' addresses for ldmatrix of 16 rows from any row of a left tile on; SharedTile's own begin
// at multiples of eight, as its exchange of chunks does.
template <typename Left>
class MovedRows {
 public:
  __device__ __forceinline__ MovedRows(uint32_t s_left, int row) {
    static_assert(Left::kCols == 64);
    const int lane = threadIdx.x % 32;
    at_ = s_left + Left::offset(row + lane % 16, lane / 16);
  }
  // Rows 16 m on, columns from the multiple k of 16 on.
  __device__ __forceinline__ void load(uint32_t (&a)[4], int m, int k) const {
    ptx::ldmatrix_x4(a, (at_ ^ (k * 2)) + m * 16 * 128);
  }

 private:
  uint32_t at_;
};

// sum[m][n] += rows row + 16 m .. of the left tile times rows col + 8 n .. of the right one, whose
// columns are channels from `channel` on.
template <typename T, bool kGrouped, typename Left, typename Right, int kM, int kN>
__device__ __forceinline__ void add_dots(ptx::Fragment (&sum)[kM][kN], uint32_t s_left, int row,
                                         uint32_t s_right, int col, int channel,
                                         const GroupsOfColumns<kN>& groups) {
  const MovedRows<Left> left(s_left, row);
  const auto right_at = Right::Lane::columns_first();
#pragma unroll
  for (int k = 0; k < Left::kCols; k += 16) {
    bool low[kN], high[kN], any = !kGrouped;
    if constexpr (kGrouped) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        low[n] = groups.has(n, channel + k);
        high[n] = groups.has(n, channel + k + 8);
        any = any || low[n] || high[n];
      }
    }
    if (!any) continue;
    uint32_t a[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) left.load(a[m], m, k);
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, s_right + right_at.at(col + n * 8, k));
#pragma unroll
      for (int y = 0; y < 2; ++y) {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          if (!kGrouped || (low[n + y] && high[n + y])) {
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

// Of floats, by exact multiply-adds.
template <std::same_as<float> T, bool kGrouped, typename Left, typename Right, int kM, int kN>
__device__ __forceinline__ void add_dots(ptx::Fragment (&sum)[kM][kN], uint32_t s_left, int row,
                                         uint32_t s_right, int col, int channel,
                                         const GroupsOfColumns<kN>& groups) {
  if constexpr (!kGrouped) {
    tile::add_dot_rows_exactly<Left, Right>(sum, s_left, row, s_right, col);
  } else {
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
}

}  // namespace fovea::layers::cuda
