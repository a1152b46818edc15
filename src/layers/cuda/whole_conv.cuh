// Convolutions of few channels: a block of threads holds all weights in shared memory, as they lie
// in memory, and convolves rows that are there too.
#pragma once

#include "layers/cuda/rows.cuh"
#include "prim/cuda/ptx/cp_async.cuh"
#include "prim/cuda/ptx/ldmatrix.cuh"
#include "prim/cuda/ptx/mma.cuh"

namespace fovea::layers::cuda {

// Rows in shared memory are this many elements longer than they need be, so that the eight that
// ldmatrix reads at once lie in different banks.
constexpr int kRowPadding = 8;

struct WholeBlock {
  int first = 0, channels = 0, group = 0;
  const void* weight = nullptr;  // [channels, group, taps]
  int offset = 0;                // in shared memory, bytes
  Divider pieces;                // of 16 bytes in a row
};

struct WholeConv {
  int taps = 1, blocks = 0;
  WholeBlock block[2];
};

__device__ __forceinline__ int weight_pitch(const WholeBlock& b, int taps) {
  return b.group * taps + kRowPadding;
}

// Begins to bring weights; threads of the block all come.
template <typename T>
__device__ __forceinline__ void load_weights(const WholeBlock& b, int taps, std::byte* s_memory) {
  const uint32_t s_weight = ptx::shared_address(s_memory) + b.offset;
  const int pieces = static_cast<int>(b.pieces.by), pitch = weight_pitch(b, taps);
  for (int i = threadIdx.x; i < b.channels * pieces; i += blockDim.x) {
    const int row = b.pieces(i), piece = i - row * pieces;
    ptx::cp_async_16(s_weight + (row * pitch + piece * 8) * 2,
                     static_cast<const T*>(b.weight) + int64_t{i} * 8);
  }
}
template <typename T>
__device__ void load_weights(const WholeConv& conv, std::byte* s_memory) {
  for (int n = 0; n < conv.blocks; ++n) load_weights<T>(conv.block[n], conv.taps, s_memory);
}

// Two weights as the halves of one word.
template <typename T>
__device__ __forceinline__ uint32_t pair_of(const T* low, const T* high) {
  return *reinterpret_cast<const uint16_t*>(low) |
         uint32_t{*reinterpret_cast<const uint16_t*>(high)} << 16;
}

// Pieces of 16 output channels that a block's groups are cut into, the last of a group maybe of 8.
__device__ __forceinline__ int pieces_of(const WholeBlock& b) {
  return b.channels / b.group * ((b.group + 15) / 16);
}

// By a warp, the columns n of one piece:
//
//   y[r][n] = sum over shift, k of x[r + shift][k] w[n][k][shift]    for 16 kM rows
//
// kBackward: w[k][n][taps - 1 - shift]. each(n, m, sum) gets 8 columns of rows from 16 m on.
template <typename T, bool kBackward, int kM, typename Each>
__device__ __forceinline__ void convolve_piece(const WholeBlock& b, int taps,
                                               const std::byte* s_memory, const T* s_x, int pitch_x,
                                               int piece, const Each& each) {
  const int lane = threadIdx.x % 32, group = b.group, of_group = (group + 15) / 16;
  const int first = piece / of_group * group, out = piece % of_group * 16;  // out: of the group
  const bool two = out + 8 < group;
  // A weight is at a row of outputs and a column of inputs, of which backward is the other way.
  const int pitch = weight_pitch(b, taps);
  const int step_n = kBackward ? taps : pitch, step_k = kBackward ? pitch : taps;
  const T* const w = reinterpret_cast<const T*>(s_memory + b.offset) + first * pitch +
                     (out + lane / 4) * step_n + lane % 4 * 2 * step_k;
  const T* const x = s_x + lane % 16 * pitch_x + b.first + first + lane / 16 * 8;
  ptx::Fragment sum[2][kM] = {};
  for (int shift = 0; shift < taps; ++shift) {
    const T* const w_tap = w + (kBackward ? taps - 1 - shift : shift);
#pragma unroll 2
    for (int k = 0; k < group; k += 16) {
      const bool whole = k + 8 < group;  // the last eight of a group may be alone
      uint32_t a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        ptx::ldmatrix_x4(a[m], ptx::shared_address(x + (m * 16 + shift) * pitch_x + k));
      }
#pragma unroll
      for (int y = 0; y < 2; ++y) {
        if (y == 1 && !two) break;
        const T* const at = w_tap + y * 8 * step_n + k * step_k;
        const uint32_t low = pair_of(at, at + step_k);
        const uint32_t high = whole ? pair_of(at + 8 * step_k, at + 9 * step_k) : 0;
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          if (whole) {
            ptx::mma_m16n8k16<T>(sum[y][m], a[m], low, high);
          } else {
            ptx::mma_m16n8k8<T>(sum[y][m], a[m][0], a[m][1], low);
          }
        }
      }
    }
  }
#pragma unroll
  for (int y = 0; y < 2; ++y) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      if (y == 0 || two) each(b.first + first + out + y * 8, m, sum[y][m]);
    }
  }
}

// All columns, a piece in turn to each warp.
template <typename T, int kM, typename Each>
__device__ __forceinline__ void convolve_rows(const WholeConv& conv, const std::byte* s_memory,
                                              const T* s_x, int pitch_x, const Each& each) {
  const int of_first = pieces_of(conv.block[0]);
  const int all = of_first + (conv.blocks > 1 ? pieces_of(conv.block[1]) : 0);
  for (int n = threadIdx.x / 32; n < all; n += blockDim.x / 32) {
    const int second = n >= of_first;
    convolve_piece<T, false, kM>(conv.block[second], conv.taps, s_memory, s_x, pitch_x,
                                 n - second * of_first, each);
  }
}

// Where fragments of convolve_rows go: rows of T, or of floats.
template <typename T>
__device__ __forceinline__ void store_fragment(T* s_rows, int pitch, int n, int m,
                                               const ptx::Fragment& sum) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int y = 0; y < 2; ++y) {
    T* const to = s_rows + (m * 16 + y * 8 + lane / 4) * pitch + n + lane % 4 * 2;
    if constexpr (sizeof(T) == 4) {
      *reinterpret_cast<float2*>(to) = {sum[2 * y], sum[2 * y + 1]};
    } else {
      *reinterpret_cast<uint32_t*>(to) = ptx::pack<T>(sum[2 * y], sum[2 * y + 1]);
    }
  }
}

}  // namespace fovea::layers::cuda
