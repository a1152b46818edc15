// The forward pass of layers of few channels in one kernel: a block takes some tokens from z to q,
// k and v, holding the weights of both convolutions.
#pragma once

#include "layers/cuda/tokens.cuh"
#include "layers/cuda/whole_conv.cuh"

namespace fovea::layers::cuda {

constexpr int kWholeThreads = 512, kWholeWarps = kWholeThreads / 32;
constexpr int kWholeRows = 32;  // of a block
constexpr int kMostTaps = 16;   // rows of z and u around a block's have room for so many

// Where rows lie in shared memory: bytes.
struct WholeRoom {
  int pitch = 0;  // of rows of q and k, in elements; of sums the same
  int wide = 0;   // rows that the first of two convolutions reads
  int near = 0;   // rows that the second reads
  int sums = 0, shares = 0, angles = 0;

  // After the weights, which take `begin` bytes.
  static WholeRoom of(int begin, int width, int dim, int& bytes) {
    WholeRoom room;
    room.pitch = width + kRowPadding;
    room.wide = begin;
    room.near = room.wide + (kWholeRows + 2 * kMostTaps) * room.pitch * 2;
    room.sums = room.near + (kWholeRows + kMostTaps) * room.pitch * 2;
    room.shares = room.sums + kWholeRows * room.pitch * 4;
    room.angles = room.shares + kWholeRows * 2 * dim * 4;
    bytes = room.angles + kWholeRows * 2 * dim * 4;
    return room;
  }
};

// Rows are numbered through the batch as in a product over taps, with room for both convolutions'.
struct WholeForward {
  int blocks = 0;  // 0: not this way
  int q_len = 0, all_rows = 0, reach = 0, u_rows = 0, width = 0, tile_cols = 0;
  Divider span;
  Values values;
  Finish finish;
  WholeConv first, second;
  WholeRoom room;
  Rows z, u;
};

constexpr int kWholeSharedBytes = 220 * 1024;

// A block's rows between the convolutions, from shared memory.
template <typename T>
__device__ __forceinline__ void store_u(const WholeForward& a, const T* s_u, int begin) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int r = warp; r < kWholeRows; r += kWholeWarps) {
    const RowAt at(begin + r, a.span);
    if (begin + r >= a.all_rows || at.r >= a.u_rows) continue;
    for (int i = lane * 8; i < a.width; i += 256) {
      store_eight(a.u.at<T>(at.b, at.r) + i, load_eight(s_u + r * a.room.pitch + i));
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kWholeThreads, 1)
    whole_forward_kernel(const __grid_constant__ WholeForward a) {
  constexpr int kRows = kWholeRows, kM = kRows / 16;
  extern __shared__ __align__(128) std::byte shared[];
  const int begin = static_cast<int>(blockIdx.x) * kRows, pitch = a.room.pitch;
  T* const s_z = reinterpret_cast<T*>(shared + a.room.wide);
  T* const s_u = reinterpret_cast<T*>(shared + a.room.near);
  float* const s_sums = reinterpret_cast<float*>(shared + a.room.sums);
  ptx::wait_for_earlier_kernels();

  load_weights<T>(a.first, shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = warp; i < kRows + a.reach; i += kWholeWarps) {
    const RowAt at(begin + i, a.span);
    const bool in = begin + i < a.all_rows;
    const T* const from = a.z.at<T>(in ? at.b : 0, in ? at.r : 0);
    for (int c = lane * 8; c < a.width; c += 256) {
      ptx::cp_async_16(ptx::shared_address(s_z + i * pitch + c), from + c, in ? 16 : 0);
    }
  }
  ptx::cp_async_commit();
  load_weights<T>(a.second, shared);
  ptx::cp_async_commit();

  Finish finish = a.finish;
  finish.coupling.sums = reinterpret_cast<float*>(shared + a.room.shares);
  float* const s_angles = reinterpret_cast<float*>(shared + a.room.angles);
  finish.angles = s_angles;
  const Coupling& c = finish.coupling;
  // Rows of the block: their place in it, in the batch, and whether they are tokens.
  const auto row_of = [&](int r) {
    const RowAt at(begin + r, a.span);
    return TokenAt{r, at, begin + r < a.all_rows && at.r < a.q_len};
  };
  for (int r = warp; r < kRows; r += kWholeWarps) {
    const TokenAt row = row_of(r);
    if (!row.is) continue;
    a.values.copy<T>(row.at, -1);
    float* const to = s_angles + r * 2 * c.dim;
    for (int i = lane; i < c.dim; i += 32) a.finish.rotation.angle(row.at, i, to[i], to[c.dim + i]);
  }
  ptx::cp_async_wait<1>();
  __syncthreads();

  if (c.kind == Coupled::kAllHeads) {
    const int i = finish.lanes.channel(), heads = c.heads + c.heads_kv;
    for (int r = warp; r < kRows; r += kWholeWarps) {
      HeadSums sums;
      const T* const s_row = s_z + (r + a.reach) * pitch + i;
      for (int head = finish.lanes.head(); head < heads; head += finish.lanes.at_once()) {
        if (i < c.dim) sums.add_head(head < c.heads, load_eight(s_row + head * c.dim));
      }
      sums.store(c, finish.lanes, r);
    }
  }
  convolve_rows<T, kM + 1>(
      a.first, shared, s_z, pitch,
      [&](int n, int m, const ptx::Fragment& sum) { store_fragment(s_u, pitch, n, m, sum); });
  ptx::cp_async_wait<0>();
  __syncthreads();
  store_u(a, s_u, begin);
  convolve_rows<T, kM>(a.second, shared, s_u, pitch, [&](int n, int m, const ptx::Fragment& sum) {
    store_fragment(s_sums, pitch, n, m, sum);
  });
  __syncthreads();
  for (int col = 0; col < a.width; col += a.tile_cols) {
    finish.heads<T>(s_sums + col, pitch, kRows, col, min(a.tile_cols, a.width - col),
                    static_cast<const T*>(nullptr), row_of);
  }
}

}  // namespace fovea::layers::cuda
