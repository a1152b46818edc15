// Backward over the tokens: from the gradients of q, k and v that attention leaves to those of the
// second convolution's sums; and to z's, where no product of matrices leads there.
#pragma once

#include "layers/cuda/tokens.cuh"

namespace fovea::layers::cuda {

struct After {
  int tokens = 0, q_len = 0;
  Values values;
  Coupling coupling;  // of dmixed, backward
  HeadNorm norm;
  Rotation rotation;
  Rows dqk, mixed, dmixed;
  float* slopes = nullptr;       // [tokens, heads_kv]: the temperature's gradient
  float* temperature = nullptr;  // [token_blocks, heads_kv]: its sums over a block's tokens
  Packs packs;
  int token_blocks = 0;
};

// One head of a token. Its angles are in shared memory.
template <typename T>
__device__ void head_backward(const After& a, const HeadLanes& lanes, int dim, int token, int head,
                              const float* s_angles) {
  const RowAt at(token, a.q_len);
  const int channel = head * a.coupling.dim;
  const T* const dqk = a.dqk.at<T>(at.b, at.r) + channel;
  const T* const mixed = a.mixed.at<T>(at.b, at.r) + channel;
  T* const dmixed = a.dmixed.at<T>(at.b, at.r) + channel;
  const auto value = [&](int i) { return ptx::to_float(dqk[i]); };
  const auto turned = [&](int i) {
    return float2{a.rotation.turned(i, s_angles, -1, value),
                  a.rotation.turned(i + 1, s_angles, -1, value)};
  };
  if (!a.norm.norm) {
    for (int i = 2 * lanes.lane; i < dim; i += 2 * lanes.count) store_pair(dmixed + i, turned(i));
    return;
  }
  float squares = 0, along = 0;
  for (int i = 2 * lanes.lane; i < dim; i += 2 * lanes.count) {
    const float2 x = load_pair(mixed + i), d = turned(i);
    squares = fmaf(x.x, x.x, fmaf(x.y, x.y, squares));
    along = fmaf(x.x, d.x, fmaf(x.y, d.y, along));
  }
  const float length = longest(lanes.sum(squares)), inverse = 1 / length;
  along = lanes.sum(along) * inverse;
  // Below the shortest length the division is by a constant, which has no gradient.
  const float bent = length > kShortest ? -along * inverse : 0;
  const float factor = length_of<T>(a.norm, head, a.coupling.heads);
  for (int i = 2 * lanes.lane; i < dim; i += 2 * lanes.count) {
    store_pair(dmixed + i, factor * inverse * (turned(i) + bent * load_pair(mixed + i)));
  }
  // factor = length * s, and s is the temperature, or its exponential.
  if (lanes.lane == 0 && dim > 0 && head >= a.coupling.heads) {
    a.slopes[int64_t{token} * a.coupling.heads_kv + head - a.coupling.heads] =
        along * (a.norm.kind == KeyTemperature::kPerHeadExp ? factor : a.norm.length);
  }
}

template <typename T>
__global__ void __launch_bounds__(kTokenThreads, 4) after_kernel(const __grid_constant__ After a) {
  __shared__ float s_angles[kTokensOfBlock * kMostDim];
  ptx::wait_for_earlier_kernels();
  const int id = static_cast<int>(blockIdx.x);
  if (id >= a.token_blocks) {
    pack_tile<T>(a.packs, id - a.token_blocks);
    return;
  }
  const int first = id * kTokensOfBlock, count = min(kTokensOfBlock, a.tokens - first);
  const int turning = a.rotation.turning, turns = turning / 2;
  for (int n = threadIdx.x; n < count * turns; n += kTokenThreads) {
    a.rotation.set_angle(RowAt(first + n / turns, a.q_len), n % turns,
                         s_angles + n / turns * turning);
  }
  const int pairs = a.values.width / 2;
  for (int n = threadIdx.x; n < count * pairs; n += kTokenThreads) {
    a.values.backward_pair<T>(RowAt(first + n / pairs, a.q_len), n % pairs);
  }
  __syncthreads();

  const HeadLanes lanes(a.coupling.dim);
  const int heads = a.coupling.heads + a.coupling.heads_kv, items = count * heads;
  const int warp = threadIdx.x / 32, at_once = lanes.heads_of_warp();
  for (int begin = warp * at_once; begin < items; begin += kTokenThreads / 32 * at_once) {
    const int item = min(begin + lanes.first, items - 1);
    const int dim = begin + lanes.first < items ? a.coupling.dim : 0;
    head_backward<T>(a, lanes, dim, first + item / heads, item % heads,
                     s_angles + item / heads * turning);
  }
  __syncthreads();  // what the block wrote of dmixed and slopes can be read by it

  if (a.coupling.kind == Coupled::kAllHeads) {
    for (int n = threadIdx.x; n < count * a.coupling.dim; n += kTokenThreads) {
      const int token = first + n / a.coupling.dim;
      a.coupling.sum_heads<T>(token, RowAt(token, a.q_len), n % a.coupling.dim);
    }
  }
  if (a.temperature == nullptr) return;
  const int heads_kv = a.coupling.heads_kv;
  for (int g = threadIdx.x; g < heads_kv; g += kTokenThreads) {
    float sum = 0;
    for (int n = 0; n < count; ++n) sum += a.slopes[int64_t{first + n} * heads_kv + g];
    a.temperature[int64_t{id} * heads_kv + g] = sum;
  }
}

// The gradient of z's q and k where the first convolution is of channels by themselves, or there
// is none (no taps: what comes is dmixed itself).
struct Spread {
  int tokens = 0, q_len = 0, channels = 0;
  Coupling coupling;
  Rows from, to;
  int taps = 0, from_rows = 0, reach = 0;  // du's row of tap j is token + reach - j
  const void* weight = nullptr;            // [channels, 1, taps]
};

template <typename T>
__global__ void __launch_bounds__(kTokenThreads) spread_kernel(const __grid_constant__ Spread a) {
  ptx::wait_for_earlier_kernels();
  const int first = static_cast<int>(blockIdx.x) * kTokensOfBlock;
  const int count = min(kTokensOfBlock, a.tokens - first), pairs = a.channels / 2;
  for (int n = threadIdx.x; n < count * pairs; n += kTokenThreads) {
    const int token = first + n / pairs, i = n % pairs * 2;
    const RowAt at(token, a.q_len);
    float2 sum = a.coupling.pair<T>(token, at, i);
    if (a.taps == 0) sum = sum + load_pair(a.from.at<T>(at.b, at.r) + i);
    const T* const w = static_cast<const T*>(a.weight) + int64_t{i} * a.taps;
    for (int tap = 0; tap < a.taps; ++tap) {
      const int r = at.r + a.reach - tap;
      if (r >= a.from_rows) continue;
      const float2 x = load_pair(a.from.at<T>(at.b, r) + i);
      sum.x = fmaf(ptx::to_float(w[tap]), x.x, sum.x);
      sum.y = fmaf(ptx::to_float(w[a.taps + tap]), x.y, sum.y);
    }
    store_pair(a.to.at<T>(at.b, at.r) + i, sum);
  }
}

}  // namespace fovea::layers::cuda
