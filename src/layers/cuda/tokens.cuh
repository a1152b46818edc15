// Passes over the tokens beside the products: what comes before the convolutions and after them,
// forward and backward. A block takes some tokens, or one tile of weights to pack.
#pragma once

#include "layers/cuda/heads.cuh"
#include "layers/cuda/pack.cuh"
#include "prim/cuda/ptx/grid_dependency.cuh"

namespace fovea::layers::cuda {

constexpr int kTokenThreads = 256;
constexpr int kTokensOfBlock = 8;
constexpr int kMostDim = 512;

// Values, half of which are those of the token before; backward, the gradient of the token after.
struct Values {
  int width = 0, now = 0;  // channels, and those of the same token
  int q_len = 0;
  Rows from, to;

  template <typename T>
  __device__ void forward_pair(RowAt at, int pair) const {
    const int i = 2 * pair;
    store_pair(to.at<T>(at.b, at.r) + i, load_pair(from.at<T>(at.b, at.r - (i >= now)) + i));
  }
  template <typename T>
  __device__ void backward_pair(RowAt at, int pair) const {
    const int i = 2 * pair, r = at.r + (i >= now);
    const float2 x = r < q_len ? load_pair(from.at<T>(at.b, r) + i) : float2{0, 0};
    store_pair(to.at<T>(at.b, at.r) + i, x);
  }
};

// y[r][c] = bias[c] + sum over taps of weight[c][tap] x[r + tap][c].
struct Depthwise {
  int taps = 0, channels = 0, rows = 0, all_rows = 0;
  const void *weight = nullptr, *bias = nullptr;
  Rows x, y;

  template <typename T>
  __device__ void pair(int number, int i) const {
    const RowAt at(number, rows);
    const T* const w = static_cast<const T*>(weight) + int64_t{i} * taps;
    float2 sum{0, 0};
    if (bias != nullptr) {
      const T* const b = static_cast<const T*>(bias) + i;
      sum = {ptx::to_float(b[0]), ptx::to_float(b[1])};
    }
    const T* from = x.at<T>(at.b, at.r) + i;
    for (int tap = 0; tap < taps; ++tap, from += x.row) {
      const float2 value = load_pair(from);
      sum.x = fmaf(ptx::to_float(w[tap]), value.x, sum.x);
      sum.y = fmaf(ptx::to_float(w[taps + tap]), value.y, sum.y);
    }
    store_pair(y.at<T>(at.b, at.r) + i, sum);
  }
};

// Before the convolutions: values, what the coupling sums, angles, packed weights; and the first
// convolution where it is of channels by themselves.
struct Before {
  int tokens = 0, q_len = 0;
  Values values;
  Coupling coupling;
  Rotation rotation;
  float* angles = nullptr;  // [tokens, 2, turning / 2]
  Depthwise depthwise;
  Packs packs;
  int token_blocks = 0, depthwise_blocks = 0;
};

template <typename T>
__global__ void __launch_bounds__(kTokenThreads) before_kernel(const __grid_constant__ Before a) {
  ptx::wait_for_earlier_kernels();
  int id = static_cast<int>(blockIdx.x);
  if (id < a.token_blocks) {
    const int first = id * kTokensOfBlock, count = min(kTokensOfBlock, a.tokens - first);
    const int pairs = a.values.width / 2, turns = a.rotation.turning / 2;
    const int sums = a.coupling.kind == Coupled::kAllHeads ? a.coupling.dim : 0;
    const int each = pairs + sums + turns;
    for (int n = threadIdx.x; n < count * each; n += kTokenThreads) {
      const int token = first + n / each;
      int i = n % each;
      const RowAt at(token, a.q_len);
      if (i < pairs) {
        a.values.forward_pair<T>(at, i);
      } else if ((i -= pairs) < sums) {
        a.coupling.sum_heads<T>(token, at, i);
      } else {
        a.rotation.set_angle(at, i - sums, a.angles + int64_t{token} * a.rotation.turning);
      }
    }
  } else if ((id -= a.token_blocks) < a.depthwise_blocks) {
    const int first = id * kTokensOfBlock,
              count = min(kTokensOfBlock, a.depthwise.all_rows - first);
    const int pairs = a.depthwise.channels / 2;
    for (int n = threadIdx.x; n < count * pairs; n += kTokenThreads) {
      a.depthwise.pair<T>(first + n / pairs, n % pairs * 2);
    }
  } else {
    pack_tile<T>(a.packs, id - a.depthwise_blocks);
  }
}

// The end of the forward pass where no product ends so: layers without convolutions, and heads
// that are wider than a tile. A block has kTokensOfBlock tokens' heads from channel
// blockIdx.y * cols on.
struct FinishAlone {
  Finish finish;
  Rows from;
  int cols = 0, channels = 0;
};

template <typename T>
__global__ void __launch_bounds__(kTokenThreads)
    finish_kernel(const __grid_constant__ FinishAlone a) {
  __shared__ float s_tile[kTokensOfBlock * kMostDim];
  ptx::wait_for_earlier_kernels();
  const int first = static_cast<int>(blockIdx.x) * kTokensOfBlock;
  const int channel = static_cast<int>(blockIdx.y) * a.cols;
  const int cols = min(a.cols, a.channels - channel), pairs = cols / 2;
  const int count = min(kTokensOfBlock, a.finish.tokens - first);
  for (int n = threadIdx.x; n < count * pairs; n += kTokenThreads) {
    const RowAt at(first + n / pairs, a.finish.q_len);
    const int i = n % pairs * 2;
    store_pair(s_tile + n / pairs * cols + i, load_pair(a.from.at<T>(at.b, at.r) + channel + i));
  }
  __syncthreads();
  a.finish.heads<T>(s_tile, cols, first, kTokensOfBlock, channel, cols, static_cast<T*>(nullptr));
}

}  // namespace fovea::layers::cuda
