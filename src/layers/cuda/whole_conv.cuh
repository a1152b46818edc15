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

// By a warp, columns n to n + 7 of a block:
//
//   y[r][n] = sum over shift, k of x[r + shift][k] w[n][k][shift]    for 16 kM rows
//
// kBackward: w[k][n][taps - 1 - shift]. each(n, m, sum) gets rows from 16 m on.
template <typename T, bool kBackward, int kM, typename Each>
__device__ __forceinline__ void convolve_columns(const WholeBlock& b, int taps,
                                                 const std::byte* s_memory, const T* s_x,
                                                 int pitch_x, int n, const Each& each) {
  const int lane = threadIdx.x % 32;
  const int first = n / b.group * b.group;  // of the group's channels
  // A weight is at a row of outputs and a column of inputs, of which backward is the other way.
  const int pitch = weight_pitch(b, taps);
  const int step_n = kBackward ? taps : pitch, step_k = kBackward ? pitch : taps;
  const T* const w = reinterpret_cast<const T*>(s_memory + b.offset) + first * pitch +
                     (n - first + lane / 4) * step_n + lane % 4 * 2 * step_k;
  const T* const x = s_x + lane % 16 * pitch_x + b.first + first + lane / 16 * 8;
  ptx::Fragment sum[kM] = {};
  for (int shift = 0; shift < taps; ++shift) {
    const T* const w_tap = w + (kBackward ? taps - 1 - shift : shift);
#pragma unroll 4
    for (int k = 0; k < b.group; k += 16) {
      const bool whole = k + 8 < b.group;  // the last eight of a group may be alone
      const T* const at = w_tap + k * step_k;
      const uint32_t low = pair_of(at, at + step_k);
      const uint32_t high = whole ? pair_of(at + 8 * step_k, at + 9 * step_k) : 0;
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        uint32_t a[4];
        ptx::ldmatrix_x4(a, ptx::shared_address(x + (m * 16 + shift) * pitch_x + k));
        if (whole) {
          ptx::mma_m16n8k16<T>(sum[m], a, low, high);
        } else {
          ptx::mma_m16n8k8<T>(sum[m], a[0], a[1], low);
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kM; ++m) each(b.first + n, m, sum[m]);
}

// All columns, eight in turn to each warp.
template <typename T, bool kBackward, int kM, typename Each>
__device__ __forceinline__ void convolve_rows(const WholeConv& conv, const std::byte* s_memory,
                                              const T* s_x, int pitch_x, const Each& each) {
  const int of_first = conv.block[0].channels, all = of_first + conv.block[1].channels;
  for (int n = threadIdx.x / 32 * 8; n < all; n += blockDim.x / 4) {
    const int second = n >= of_first;
    convolve_columns<T, kBackward, kM>(conv.block[second], conv.taps, s_memory, s_x, pitch_x,
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
