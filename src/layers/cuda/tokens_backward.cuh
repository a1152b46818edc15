// Backward over the tokens: from the gradients of q, k and v that attention leaves to those of the
// second convolution's sums; and to z's, where no product of matrices leads there.
#pragma once

#include "layers/cuda/tokens.cuh"

namespace fovea::layers::cuda {

struct After {
  int tokens = 0;
  Divider q_len;
  Coupling coupling;  // of dmixed, backward
  HeadNorm norm;
  HeadLanes lanes;
  Rotation rotation;
  Rows dqk, qk, dmixed;
  Rows keys, inverses;           // as Finish has left them
  float* slopes = nullptr;       // [tokens, heads_kv]: the temperature's gradient
  float* temperature = nullptr;  // [token_blocks, heads_kv]: its sums over a block's tokens
  Packs packs;
  int token_blocks = 0;
  int zero_rows = 0;  // of dmixed, after the last token of each member of the batch
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
  const T* const dqk = a.dqk.at<T>(at.b, at.r);
  // What was divided by its length; of q's heads it is there in another length.
  const T* const qk = a.qk.at<T>(at.b, at.r);
  const T* const keys = a.keys.at<T>(at.b, at.r) - c.heads * dim;
  const float* const inverses = a.inverses.at<float>(at.b, at.r);
  struct Head {
    RawEight<T> dy, x;
    float factor = 0, divided = 0;
  };
  const auto fetch = [&](int head) {
    Head h;
    if (!is || head >= heads) return h;
    h.dy = load_raw(dqk + head * dim + i);
    if (!a.norm.norm) return h;
    h.x = load_raw((head < c.heads ? qk : keys) + head * dim + i);
    h.factor = length_of<T>(a.norm, head, c.heads);
    if (head < c.heads) h.divided = inverses[head];
    return h;
  };
  Head next = fetch(a.lanes.head());
  Eight cosines{}, sines{};
  a.rotation.angles(at, i, cosines, sines);
  const auto turn_back = [&](const Eight& y, const T* head) {
    const Eight partners = a.rotation.partners(y, head, i);
    Eight x{};
    add_product(x, y, cosines);
#pragma unroll
    for (int n = 0; n < 8; ++n) x.x[n] = fmaf(-sines.x[n], partners.x[n], x.x[n]);
    return x;
  };
  HeadSums sums;
  // Heads in turns of a warp's: its lanes stay together. Those of the next turn are on their way.
#pragma unroll 1
  for (int begin = 0; begin < heads; begin += a.lanes.at_once()) {
    const int head = begin + a.lanes.head();
    const bool live = is && head < heads;
    const Head now = next;
    next = fetch(head + a.lanes.at_once());
    Eight d{}, x{};
    if (live) {
      d = turn_back(eight_of(now.dy), dqk + head * dim);
      if (a.norm.norm) {
        x = eight_of(now.x);
        if (head < c.heads) x = turn_back(x, qk + head * dim);
      }
    }
    if (a.norm.norm) {
      const float inverse = 1 / longest(a.lanes.sum(dot(x, x)));
      const float along = a.lanes.sum(dot(x, d)) * inverse;
      const float factor = now.factor, divided = head < c.heads ? now.divided : inverse;
      // Below the shortest length the division is by a constant, which has no gradient.
      if (divided < 1 / kShortest) add(d, x, -along * inverse);
      scale(d, factor * divided);
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

// slopes: of the token.
template <typename T>
__device__ void after_token(const After& a, int token, float* slopes) {
  const RowAt at(token, a.q_len);
  T* const dmixed = a.dmixed.at<T>(at.b, at.r);
  HeadSums sums = token_backward<T>(
      a, at, slopes, [&](int channel, const Eight& x) { store_eight(dmixed + channel, x); });
  if (a.coupling.kind == Coupled::kAllHeads) sums.store(a.coupling, a.lanes, token);
  if (at.r + 1 != static_cast<int>(a.q_len.by)) return;
  const int width = (a.coupling.heads + a.coupling.heads_kv) * a.coupling.dim;
  for (int r = 1; r <= a.zero_rows; ++r) {
    for (int i = threadIdx.x % 32 * 8; i < width; i += 256) {
      store_eight(a.dmixed.at<T>(at.b, at.r + r) + i, Eight{});
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kTokenThreads, sizeof(T) == 4 ? 1 : 2)
    after_kernel(const __grid_constant__ After a) {
  constexpr int kMostShared = 64;  // heads whose slopes stay in the block
  __shared__ float s_slopes[kTokensOfBlock * kMostShared];
  ptx::wait_for_earlier_kernels();
  int id = static_cast<int>(blockIdx.x);
  if (id < a.packs.tiles) {
    pack_tile<T>(a.packs, id);
    return;
  }
  id -= a.packs.tiles;
  const int heads_kv = a.coupling.heads_kv, own = static_cast<int>(threadIdx.x) / 32;
  const int first = id * kTokensOfBlock, token = first + own;
  float* const slopes =
      heads_kv <= kMostShared ? s_slopes : a.slopes + int64_t{first} * heads_kv;  // of the block
  if (token < a.tokens) {
    after_token<T>(a, token, a.slopes != nullptr ? slopes + own * heads_kv : nullptr);
  }
  if (a.temperature == nullptr) return;
  __syncthreads();  // what the block wrote of slopes can be read by it
  const int count = min(kTokensOfBlock, a.tokens - first);
  for (int g = threadIdx.x; g < heads_kv; g += kTokenThreads) {
    float sum = 0;
    for (int t = 0; t < count; ++t) sum += slopes[t * heads_kv + g];
    a.temperature[int64_t{id} * heads_kv + g] = sum;
  }
}

// The gradient of z's values: later than that of q and k, for which memory of z's gradient may
// still be read.
struct ValuesBack {
  int tokens = 0;
  Divider q_len;
  Values values;
};

template <typename T>
__global__ void __launch_bounds__(kTokenThreads)
    values_back_kernel(const __grid_constant__ ValuesBack a) {
  ptx::wait_for_earlier_kernels();
  const int token = static_cast<int>(blockIdx.x) * kTokensOfBlock + threadIdx.x / 32;
  if (token < a.tokens) a.values.copy<T>(RowAt(token, a.q_len), 1);
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
