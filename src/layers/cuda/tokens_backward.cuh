// Backward over the tokens: from the gradients of q, k and v that attention leaves to those of the
// second convolution's sums; and to z's, where no product of matrices leads there.
#pragma once

#include "layers/cuda/tokens.cuh"

namespace fovea::layers::cuda {

struct After {
  int tokens = 0;
  Divider q_len;
  Values values;
  Coupling coupling;  // of dmixed, backward
  HeadNorm norm;
  HeadLanes lanes;
  Rotation rotation;
  Rows dqk, mixed, dmixed;
  float* slopes = nullptr;       // [tokens, heads_kv]: the temperature's gradient
  float* temperature = nullptr;  // [token_blocks, heads_kv]: its sums over a block's tokens
  Packs packs;
  int token_blocks = 0;
};

// One token, by a warp: a lane has the same channels of some heads. keep(channel, x) gets eight of
// dmixed, and slopes [heads_kv], where given, the temperature's gradient. Gives the sums over
// heads.
template <typename T, typename Keep>
__device__ __forceinline__ HeadSums token_backward(const After& a, RowAt at, float* slopes,
                                                   const Keep& keep) {
  const Coupling& c = a.coupling;
  const int dim = c.dim, heads = c.heads + c.heads_kv, i = a.lanes.channel();
  const bool is = i < dim;
  Eight cosines{}, sines{};
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    if (is) a.rotation.angle(at, i + n, cosines.x[n], sines.x[n]);
  }
  HeadSums sums;
  const T* const dqk = a.dqk.at<T>(at.b, at.r);
  const T* const mixed = a.mixed.at<T>(at.b, at.r);
  // Heads in turns of a warp's: its lanes stay together.
  for (int begin = 0; begin < heads; begin += a.lanes.at_once()) {
    const int head = begin + a.lanes.head();
    const bool live = is && head < heads;
    Eight d{}, x{};
    if (live) {
      const Eight dy = load_eight(dqk + head * dim + i);
      add_product(d, dy, cosines);
      const Eight partners = a.rotation.partners(dy, dqk + head * dim, i);
#pragma unroll
      for (int n = 0; n < 8; ++n) d.x[n] = fmaf(-sines.x[n], partners.x[n], d.x[n]);
      if (a.norm.norm) x = load_eight(mixed + head * dim + i);
    }
    if (a.norm.norm) {
      const float inverse = 1 / longest(a.lanes.sum(dot(x, x)));
      const float along = a.lanes.sum(dot(x, d)) * inverse;
      const float factor = live ? length_of<T>(a.norm, head, c.heads) : 0;
      // Below the shortest length the division is by a constant, which has no gradient.
      if (inverse < 1 / kShortest) add(d, x, -along * inverse);
      scale(d, factor * inverse);
      // factor = length * s, and s is the temperature, or its exponential.
      if (slopes != nullptr && i == 0 && live && head >= c.heads) {
        slopes[head - c.heads] =
            along * (a.norm.kind == KeyTemperature::kPerHeadExp ? factor : a.norm.length);
      }
    }
    if (!live) continue;
    keep(head * dim + i, d);
    sums.add_head(head < c.heads, d);
  }
  return sums;
}

template <typename T>
__device__ void after_token(const After& a, int token) {
  const RowAt at(token, a.q_len);
  a.values.copy<T>(at, 1);
  T* const dmixed = a.dmixed.at<T>(at.b, at.r);
  float* const slopes =
      a.slopes != nullptr ? a.slopes + int64_t{token} * a.coupling.heads_kv : nullptr;
  HeadSums sums = token_backward<T>(
      a, at, slopes, [&](int channel, const Eight& x) { store_eight(dmixed + channel, x); });
  if (a.coupling.kind == Coupled::kAllHeads) sums.store(a.coupling, a.lanes, token);
}

template <typename T>
__global__ void __launch_bounds__(kTokenThreads, 2) after_kernel(const __grid_constant__ After a) {
  ptx::wait_for_earlier_kernels();
  int id = static_cast<int>(blockIdx.x);
  if (id < a.packs.tiles) {
    pack_tile<T>(a.packs, id);
    return;
  }
  id -= a.packs.tiles;
  const int first = id * kTokensOfBlock, token = first + static_cast<int>(threadIdx.x) / 32;
  if (token < a.tokens) after_token<T>(a, token);
  if (a.temperature == nullptr) return;
  __syncthreads();  // what the block wrote of slopes can be read by it
  const int heads_kv = a.coupling.heads_kv, end = min(first + kTokensOfBlock, a.tokens);
  for (int g = threadIdx.x; g < heads_kv; g += kTokenThreads) {
    float sum = 0;
    for (int t = first; t < end; ++t) sum += a.slopes[int64_t{t} * heads_kv + g];
    a.temperature[int64_t{id} * heads_kv + g] = sum;
  }
}

// The gradient of z's q and k where the first convolution is of channels by themselves, or there
// is none (no taps: what comes is dmixed itself).
struct Spread {
  int tokens = 0, channels = 0;
  Divider q_len;
  Coupling coupling;
  Rows from, to;
  int taps = 0, from_rows = 0, reach = 0;  // du's row of tap j is token + reach - j
  const void* weight = nullptr;            // [channels, 1, taps]
};

template <typename T>
__global__ void __launch_bounds__(kTokenThreads) spread_kernel(const __grid_constant__ Spread a) {
  ptx::wait_for_earlier_kernels();
  const int token = static_cast<int>(blockIdx.x) * kTokensOfBlock + threadIdx.x / 32;
  if (token >= a.tokens) return;
  const RowAt at(token, a.q_len);
  const int dim = a.coupling.dim;
  for (int i = threadIdx.x % 32 * 8; i < a.channels; i += 256) {
    const int head = i / dim;
    Eight sum = a.coupling.share<T>(token, at, head, i - head * dim);
    if (a.taps == 0) add(sum, load_eight(a.from.at<T>(at.b, at.r) + i));
    const T* const weight = static_cast<const T*>(a.weight) + int64_t{i} * a.taps;
    for (int tap = 0; tap < a.taps; ++tap) {
      const int r = at.r + a.reach - tap;
      if (r >= a.from_rows) continue;
      add_product(sum, load_eight_apart(weight + tap, a.taps),
                  load_eight(a.from.at<T>(at.b, r) + i));
    }
    store_eight(a.to.at<T>(at.b, at.r) + i, sum);
  }
}

}  // namespace fovea::layers::cuda
