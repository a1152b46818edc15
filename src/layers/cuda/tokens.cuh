// Passes over the tokens beside the products: what comes before the convolutions and after them,
// forward and backward. A block takes some tokens, or one tile of weights to pack.
#pragma once

#include "layers/cuda/heads.cuh"
#include "layers/cuda/pack.cuh"
#include "prim/cuda/ptx/grid_dependency.cuh"

namespace fovea::layers::cuda {

constexpr int kTokenThreads = 256;
constexpr int kTokensOfBlock = kTokenThreads / 32;  // a warp's each
constexpr int kMostDim = 256;                       // that a warp holds

// Values, half of which are those of the token before; backward, the gradient of the token after.
struct Values {
  int width = 0, now = 0;  // channels, and those of the same token
  int q_len = 0;
  Rows from, to;
  int first = -1;  // row that there is; rows before it are zeros

  // All channels of a token, by a warp. Halves are multiples of four channels.
  template <typename T>
  __device__ __forceinline__ void copy(RowAt at, int step) const {
#pragma unroll 1
    for (int i = threadIdx.x % 32 * 4; i < width; i += 128) move<T>(at, step, i);
  }
  // Four of them.
  template <typename T>
  __device__ __forceinline__ void move(RowAt at, int step, int i) const {
    store<T>(at, i, load<T>(at, step, i));
  }

  // Four channels on their way; zeros where there are none.
  template <typename T>
  using Four = std::conditional_t<sizeof(T) == 4, uint4, uint2>;
  template <typename T>
  __device__ __forceinline__ Four<T> load(RowAt at, int step, int i) const {
    const int r = at.r + (i >= now ? step : 0);
    return i < width && r >= first && r < q_len
               ? *reinterpret_cast<const Four<T>*>(from.at<T>(at.b, r) + i)
               : Four<T>{};
  }
  template <typename T>
  __device__ __forceinline__ void store(RowAt at, int i, const Four<T>& x) const {
    if (i < width) *reinterpret_cast<Four<T>*>(to.at<T>(at.b, at.r) + i) = x;
  }
};

// y[r][c] = bias[c] + sum over taps of weight[c][tap] x[r + tap][c].
struct Depthwise {
  int taps = 0, channels = 0, all_rows = 0;
  Divider rows;
  const void *weight = nullptr, *bias = nullptr;
  Rows x, y;
};

// Before the convolutions: values, what the coupling sums, angles, packed weights; and the first
// convolution where it is of channels by themselves.
struct Before {
  int tokens = 0;
  Divider q_len;
  Values values;
  Coupling coupling;
  HeadLanes lanes;
  Rotation rotation;
  float* angles = nullptr;  // [tokens, 2, dim]
  Depthwise depthwise;
  Packs packs;
  int token_blocks = 0, depthwise_blocks = 0;
};

template <typename T>
__device__ void before_token(const Before& a, int token) {
  const RowAt at(token, a.q_len);
  const Coupling& c = a.coupling;
  a.values.copy<T>(at, -1);
  if (c.kind == Coupled::kAllHeads) {
    HeadSums sums;
    const int i = a.lanes.channel(), heads = c.heads + c.heads_kv;
    const T* const row = c.x.at<T>(at.b, at.r) + i;
#pragma unroll 4
    for (int head = a.lanes.head(); head < heads; head += a.lanes.at_once()) {
      if (i < c.dim) sums.add_head(head < c.heads, load_eight(row + head * c.dim));
    }
    sums.store(c, a.lanes, token);
  }
  float* const to = a.angles + int64_t{token} * 2 * c.dim;
  for (int i = threadIdx.x % 32; i < c.dim; i += 32) {
    a.rotation.angle(at, i, to[i], to[c.dim + i]);
  }
}

constexpr int kDepthwiseRows = 32;  // of a block, by as many columns as its threads hold

template <typename T>
__device__ void depthwise_rows(const Depthwise& d, int id) {
  const int pieces = d.channels / 8, across = (pieces + kTokenThreads - 1) / kTokenThreads;
  const int i = (id % across * kTokenThreads + threadIdx.x) * 8;
  if (i >= d.channels) return;
  const T* const weight = static_cast<const T*>(d.weight) + int64_t{i} * d.taps;
  const T* const bias = static_cast<const T*>(d.bias);
  const Eight start = bias != nullptr ? load_eight_apart(bias + i) : Eight{};
  const int first = id / across * kDepthwiseRows;
#pragma unroll 2
  for (int n = first; n < min(first + kDepthwiseRows, d.all_rows); ++n) {
    const RowAt at(n, d.rows);
    Eight sum = start;
    for (int tap = 0; tap < d.taps; ++tap) {
      add_product(sum, load_eight_apart(weight + tap, d.taps),
                  load_eight(d.x.at<T>(at.b, at.r + tap) + i));
    }
    store_eight(d.y.at<T>(at.b, at.r) + i, sum);
  }
}

inline int depthwise_blocks(const Depthwise& d) {
  const int across = (d.channels / 8 + kTokenThreads - 1) / kTokenThreads;
  return (d.all_rows + kDepthwiseRows - 1) / kDepthwiseRows * across;
}

template <typename T>
__global__ void __launch_bounds__(kTokenThreads, 4)
    before_kernel(const __grid_constant__ Before a) {
  ptx::wait_for_earlier_kernels();
  int id = static_cast<int>(blockIdx.x);
  if (id < a.packs.tiles) {
    pack_tile<T>(a.packs, id);
  } else if ((id -= a.packs.tiles) < a.token_blocks) {
    const int token = id * kTokensOfBlock + static_cast<int>(threadIdx.x) / 32;
    if (token < a.tokens) before_token<T>(a, token);
  } else {
    depthwise_rows<T>(a.depthwise, id - a.token_blocks);
  }
}

// The end of the forward pass where no product ends so: layers without convolutions, and heads
// that are wider than a tile. A block has some tokens' heads from channel blockIdx.y * cols on.
struct FinishAlone {
  Finish finish;
  Rows from;
  int cols = 0, channels = 0, tokens = 0;
  Divider q_len;
};

template <typename T>
__global__ void __launch_bounds__(kTokenThreads)
    finish_kernel(const __grid_constant__ FinishAlone a) {
  __shared__ __align__(16) float s_tile[kTokensOfBlock * kMostDim];
  ptx::wait_for_earlier_kernels();
  const int first = static_cast<int>(blockIdx.x) * kTokensOfBlock;
  const int channel = static_cast<int>(blockIdx.y) * a.cols;
  const int cols = min(a.cols, a.channels - channel);
  const auto row_of = [&](int r) {
    const int token = first + r;
    return TokenAt{token, RowAt(token, a.q_len), token < a.tokens};
  };
  const TokenAt row = row_of(static_cast<int>(threadIdx.x) / 32);
  const int i = threadIdx.x % 32 * 8;
  if (row.is && i < cols) {
    const T* const from = a.from.at<T>(row.at.b, row.at.r) + channel + i;
    store_eight(s_tile + threadIdx.x / 32 * kMostDim + i, load_eight(from));
  }
  __syncthreads();
  a.finish.heads<T>(s_tile, kMostDim, kTokensOfBlock, channel, cols, static_cast<T*>(nullptr),
                    row_of);
}

}  // namespace fovea::layers::cuda
