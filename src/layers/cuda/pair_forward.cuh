// The forward pass of layers of few channels in one kernel: two blocks take some tokens from z to
// q, k and v.
#pragma once

#include "layers/cuda/pair_conv.cuh"

namespace fovea::layers::cuda {

constexpr int kSumParts = 3;  // of the second convolution's depth, that warps share

// Where things lie in shared memory after the weights: bytes; and pitches, in elements.
struct ForwardRoom {
  int pitch = 0;                                   // of rows of q and k
  int z = 0, u = 0, spread = 0, spread_pitch = 0;  // rows, and either with its taps
  int sums = 0, sum_pitch = 0;                     // of this block's channels, for each part
  int shares = 0, angles = 0;

  static ForwardRoom of(int begin, int width, int dim, int taps, int& bytes) {
    ForwardRoom room;
    room.pitch = width + kPairPadding;
    room.z = begin;
    room.u = room.z + (kPairNearRows + taps - 1) * room.pitch * 2;
    room.spread = room.u + kPairNearRows * room.pitch * 2;
    room.spread_pitch = width * taps + kPairPadding;
    room.sums = room.spread + kPairNearRows * room.spread_pitch * 2;
    room.sum_pitch = width / 2 + kPairPadding;
    room.shares = room.sums + kSumParts * kPairRows * room.sum_pitch * 4;
    room.angles = room.shares + kPairRows * 2 * dim * 4;
    bytes = room.angles + kPairRows * 2 * dim * 4;
    return room;
  }
};

// Rows are numbered through the batch as in a product over taps, with room for both convolutions'.
struct PairForward {
  int blocks = 0;        // twice as many as pieces of the rows; 0: not this way
  bool settled = false;  // weights may be read before earlier kernels have ended
  int q_len = 0, all_rows = 0, reach = 0, u_rows = 0, width = 0, tile_cols = 0;
  Divider span;
  Values values;
  Finish finish;
  PairConv first, second;
  int lanes_of_q = 0, lanes_of_k = 0;  // as Finish::lanes_of_row, of a block's own
  ForwardRoom room;
  Rows z, u;
};

// Each head's channels by themselves, to the rows of u that both blocks have.
template <typename T>
__device__ __forceinline__ void convolve_heads(const PairForward& a, const Pair& pair,
                                               std::byte* shared) {
  constexpr int kTiles = kPairNearRows / 16;
  const T* const s_spread = reinterpret_cast<const T*>(shared + a.room.spread);
  T* const s_u = reinterpret_cast<T*>(shared + a.room.u);
  const int taps = a.first.taps, pitch = a.room.spread_pitch;
  over_units(
      a.first, [](const PairBlock& b) { return b.own() / 16 * kTiles; },
      [&](const PairBlock& b, int begin, int unit) {
        const int c = unit / kTiles * 16, row = unit % kTiles * 16;
        const int head = b.by_group(c) * b.group;
        const T* const s_weight = reinterpret_cast<const T*>(shared + b.offset);
        ptx::Fragment sum[1][2] = {};
        multiply_tile<T, false, 1>(sum, s_spread + row * pitch + (begin + head) * taps, pitch,
                                   s_weight + c * b.pitch(), b.pitch(), b.group * taps / 16);
        T* const to = s_u + row * a.room.pitch + b.first + pair.rank * b.own() + c;
        over_fragments(sum, [&](int r, int col, float x, float y) {
          pair.store(to + r * a.room.pitch + col, ptx::pack<T>(x, y));
        });
      });
}

// All channels, to sums of this block's own. Their depth is cut into parts, which are then added.
template <typename T>
__device__ __forceinline__ void convolve_all(const PairForward& a, std::byte* shared) {
  const T* const s_spread = reinterpret_cast<const T*>(shared + a.room.spread);
  float* const s_sums = reinterpret_cast<float*>(shared + a.room.sums);
  const int taps = a.second.taps, pitch = a.room.sum_pitch, part_size = kPairRows * pitch;
  over_units(
      a.second, [](const PairBlock& b) { return b.own() / 16 * kSumParts; },
      [&](const PairBlock& b, int begin, int unit) {
        const int c = unit / kSumParts * 16, part = unit % kSumParts;
        const int steps = b.group * taps / 16, of_part = (steps + kSumParts - 1) / kSumParts;
        const int k = part * of_part;
        const T* const s_weight = reinterpret_cast<const T*>(shared + b.offset);
        ptx::Fragment sum[2][2] = {};
        multiply_tile<T, false, 2>(sum, s_spread + b.first * taps + k * 16, a.room.spread_pitch,
                                   s_weight + c * b.pitch() + k * 16, b.pitch(),
                                   min(of_part, steps - k));
        float* const to = s_sums + part * part_size + begin + c;
        over_fragments(sum, [&](int r, int col, float x, float y) {
          *reinterpret_cast<float2*>(to + r * pitch + col) = {x, y};
        });
      });
  __syncthreads();
#pragma unroll 1
  for (int r = threadIdx.x / 32; r < kPairRows; r += kPairWarps) {
#pragma unroll 1
    for (int c = threadIdx.x % 32 * 4; c < a.width / 2; c += 128) {
      float4* const at = reinterpret_cast<float4*>(s_sums + r * pitch + c);
      float4 sum = *at;
#pragma unroll
      for (int part = 1; part < kSumParts; ++part) {
        const float4 x = at[part * part_size / 4];
        sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
      }
      *at = sum;
    }
  }
  __syncthreads();
}

template <typename T>
__global__ void FOVEA_IN_PAIRS __launch_bounds__(kPairThreads, 1)
    pair_forward_kernel(const __grid_constant__ PairForward a) {
  constexpr int kRows = kPairRows;
  extern __shared__ __align__(128) std::byte shared[];
  const Pair pair(shared);
  const int begin = static_cast<int>(blockIdx.x / 2) * kRows, pitch = a.room.pitch;
  T* const s_z = reinterpret_cast<T*>(shared + a.room.z);
  T* const s_u = reinterpret_cast<T*>(shared + a.room.u);
  T* const s_spread = reinterpret_cast<T*>(shared + a.room.spread);
  float* const s_sums = reinterpret_cast<float*>(shared + a.room.sums);
  if (!a.settled) ptx::wait_for_earlier_kernels();
  load_weights<T>(a.first, shared, pair.rank);
  load_weights<T>(a.second, shared, pair.rank);
  ptx::cp_async_commit();
  if (a.settled) ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_begin();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int i = warp; i < kRows + a.reach; i += kPairWarps) {
    const RowAt at(begin + i, a.span);
    const bool in = begin + i < a.all_rows;
    const T* const from = a.z.at<T>(in ? at.b : 0, in ? at.r : 0);
#pragma unroll 1
    for (int c = lane * 8; c < a.width; c += 256) {
      ptx::cp_async_16(ptx::shared_address(s_z + i * pitch + c), from + c, in ? 16 : 0);
    }
  }
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
#pragma unroll 1
  for (int r = warp + pair.rank * kPairWarps; r < kRows; r += 2 * kPairWarps) {
    const TokenAt row = row_of(r);
    if (row.is) a.values.copy<T>(row.at, -1);
  }
  finish.rotation.fill_angles(s_angles, kRows, c.dim, row_of);
  ptx::cp_async_wait<0>();
  __syncthreads();

  if (c.kind == Coupled::kAllHeads) {
    const int i = finish.lanes.channel(), heads = c.heads + c.heads_kv;
#pragma unroll 1
    for (int r = warp; r < kRows; r += kPairWarps) {
      HeadSums sums;
      const T* const s_row = s_z + (r + a.reach) * pitch + i;
#pragma unroll 1
      for (int head = finish.lanes.head(); head < heads; head += finish.lanes.at_once()) {
        if (i < c.dim) sums.add_head(head < c.heads, load_eight(s_row + head * c.dim));
      }
      sums.store(c, finish.lanes, r);
    }
  }
  over_own_columns(a.first, pair.rank, [&](int first, int own, int columns) {
    spread_taps(s_spread + own * a.first.taps, a.room.spread_pitch, s_z + first, pitch,
                kRows + a.second.taps - 1, columns, a.first.taps);
  });
  ptx::cluster_sync();  // the other block is there
  convolve_heads<T>(a, pair, shared);
  ptx::cluster_sync();
#pragma unroll 1
  for (int r = warp + pair.rank * kPairWarps; r < kRows; r += 2 * kPairWarps) {
    const RowAt at(begin + r, a.span);
    if (begin + r >= a.all_rows || at.r >= a.u_rows) continue;
#pragma unroll 1
    for (int i = lane * 8; i < a.width; i += 256) {
      *reinterpret_cast<uint4*>(a.u.at<T>(at.b, at.r) + i) =
          *reinterpret_cast<const uint4*>(s_u + r * pitch + i);
    }
  }
  spread_taps(s_spread, a.room.spread_pitch, s_u, pitch, kRows, a.width, a.second.taps);
  __syncthreads();
  convolve_all<T>(a, shared);
  over_own_columns(a.second, pair.rank, [&](int first, int own, int columns) {
    finish.lanes_of_row = own == 0 ? a.lanes_of_q : a.lanes_of_k;
#pragma unroll 1
    for (int col = 0; col < columns; col += a.tile_cols) {
      finish.heads<T>(s_sums + own + col, a.room.sum_pitch, kRows, first + col,
                      min(a.tile_cols, columns - col), static_cast<const T*>(nullptr), row_of);
    }
  });
}

}  // namespace fovea::layers::cuda
