// Backward of layers of few channels in one kernel, but for the gradients of weights: two blocks
// take some tokens from the gradients that attention leaves to z's.
#pragma once

#include "layers/cuda/pair_forward.cuh"
#include "layers/cuda/tokens_backward.cuh"

namespace fovea::layers::cuda {

// As ForwardRoom.
struct BackwardRoom {
  int pitch = 0;
  int dmixed = 0;               // all channels
  int sums = 0, sum_pitch = 0;  // of this block's, taps and all
  int du = 0, du_pitch = 0;     // of this block's
  int shares = 0, angles = 0;

  static BackwardRoom of(int begin, int width, int dim, int taps, int& bytes) {
    BackwardRoom room;
    room.pitch = width + kPairPadding;
    room.dmixed = begin;
    room.sums = room.dmixed + kPairNearRows * room.pitch * 2;
    room.sum_pitch = width / 2 * taps + kPairPadding;
    room.du = room.sums + kPairNearRows * room.sum_pitch * 4;
    room.du_pitch = width / 2 + kPairPadding;
    room.shares = room.du + kPairNearRows * room.du_pitch * 2;
    room.angles = room.shares + kPairRows * 2 * dim * 4;
    bytes = room.angles + kPairNearRows * 2 * dim * 4;
    return room;
  }
};

// Rows are du's, numbered through the batch with room between its members for what both
// convolutions reach; row r stands for token r - margin.
struct PairBackward {
  int blocks = 0;        // twice as many as pieces of the rows; 0: not this way
  bool settled = false;  // weights may be read before earlier kernels have ended
  int q_len = 0, all_rows = 0, reach = 0, margin = 0, u_rows = 0, width = 0;
  Divider span;
  After after;
  PairConv first, second;
  Divider eights, by_dim;  // of a block's own channels, and a head's
  BackwardRoom room;
  Rows du, dz;
};

// Of rows of all channels, or of this block's own alone, to sums of its own with their taps apart.
template <typename T, bool kAll>
__device__ __forceinline__ void convolve_back(const PairConv& conv, const T* s_from, int pitch,
                                              float* s_sums, int sum_pitch,
                                              const std::byte* shared) {
  constexpr int kM = kPairNearRows / 16;
  over_units(
      conv, [&](const PairBlock& b) { return b.own() * conv.taps / 16; },
      [&](const PairBlock& b, int begin, int unit) {
        const int c = unit * 16, group = kAll ? 0 : b.by_inputs(c);
        const int col = c - group * static_cast<int>(b.by_inputs.by);
        const T* const s_weight = reinterpret_cast<const T*>(shared + b.offset);
        const T* const from = s_from + (kAll ? b.first : begin + group * b.group);
        ptx::Fragment sum[kM][2] = {};
        multiply_tile<T, true, kM>(sum, from, pitch,
                                   s_weight + group * b.group * b.pitch() + (kAll ? c : col),
                                   b.pitch(), b.group / 16);
        float* const to = s_sums + begin * conv.taps + c;
        over_fragments(sum, [&](int r, int in, float x, float y) {
          *reinterpret_cast<float2*>(to + r * sum_pitch + in) = {x, y};
        });
      });
}

// Eight channels of a row from sums with their taps apart.
__device__ __forceinline__ Eight gather_taps(const float* s_sums, int pitch, int row, int channel,
                                             int taps) {
  Eight x{};
#pragma unroll 1
  for (int tap = 0; tap < taps; ++tap) {
    const float* const from = s_sums + (row + taps - 1 - tap) * pitch + channel * taps + tap;
#pragma unroll
    for (int i = 0; i < 8; ++i) x.x[i] += from[i * taps];
  }
  return x;
}

template <typename T>
__global__ void FOVEA_IN_PAIRS __launch_bounds__(kPairThreads, 1)
    pair_backward_kernel(const __grid_constant__ PairBackward a) {
  constexpr int kRows = kPairRows;
  extern __shared__ __align__(128) std::byte shared[];
  const Pair pair(shared);
  const int block = static_cast<int>(blockIdx.x / 2), begin = block * kRows, pitch = a.room.pitch;
  T* const s_dmixed = reinterpret_cast<T*>(shared + a.room.dmixed);
  T* const s_du = reinterpret_cast<T*>(shared + a.room.du);
  float* const s_sums = reinterpret_cast<float*>(shared + a.room.sums);
  float* const s_angles = reinterpret_cast<float*>(shared + a.room.angles);
  if (!a.settled) ptx::wait_for_earlier_kernels();
  load_weights<T>(a.second, shared, pair.rank);
  load_weights<T>(a.first, shared, pair.rank);
  ptx::cp_async_commit();
  if (a.settled) ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_begin();

  const After& after = a.after;
  Coupling coupling = after.coupling;
  coupling.sums = reinterpret_cast<float*>(shared + a.room.shares);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, heads_kv = coupling.heads_kv;
  // Rows as tokens, those of no token among them.
  const auto row_of = [&](int r) {
    RowAt at(begin + r, a.span);
    at.r -= a.margin;
    return TokenAt{r, at, begin + r < a.all_rows && at.r >= 0 && at.r < a.q_len};
  };
  after.rotation.fill_angles(s_angles, kRows + a.reach, coupling.dim, row_of);
  ptx::cluster_sync();  // the other block is there
#pragma unroll 1
  for (int r = warp + pair.rank * kPairWarps; r < kRows + a.reach; r += 2 * kPairWarps) {
    const TokenAt row = row_of(r);
    T* const s_row = s_dmixed + r * pitch;
    if (!row.is) {
#pragma unroll 1
      for (int i = lane * 8; i < a.width; i += 256) pair.store(s_row + i, uint4{});
      continue;
    }
    const bool own = r < kRows;
    const int64_t token = int64_t{row.at.b} * a.q_len + row.at.r;
    T* const dmixed = after.dmixed.at<T>(row.at.b, row.at.r);
    HeadSums sums = token_backward<T>(
        after, row.at, AnglesAt{s_angles + r * 2 * coupling.dim, coupling.dim},
        own && after.slopes != nullptr ? after.slopes + token * heads_kv : nullptr,
        [&](int channel, const Eight& x) {
          const uint4 packed = pack_eight<T>(x);
          pair.store(s_row + channel, packed);
          if (own) *reinterpret_cast<uint4*>(dmixed + channel) = packed;
        });
    if (!own) continue;
    after.values.copy<T>(row.at, 1);
    if (coupling.kind == Coupled::kAllHeads) {
      sums.store(coupling, after.lanes, r, [&](float* to, const Eight& x) {
        pair.store(to, float_words(x, 0));
        pair.store(to + 4, float_words(x, 4));
      });
    }
  }
  ptx::cp_async_wait<0>();
  ptx::cluster_sync();

  convolve_back<T, true>(a.second, s_dmixed, pitch, s_sums, a.room.sum_pitch, shared);
  if (after.temperature != nullptr && pair.rank == 0 && warp == kPairWarps - 1) {
#pragma unroll 1
    for (int g = 0; g < heads_kv; ++g) {
      float sum = 0;
#pragma unroll 1
      for (int r = lane; r < kRows; r += 32) {
        const TokenAt row = row_of(r);
        if (row.is) sum += after.slopes[(int64_t{row.at.b} * a.q_len + row.at.r) * heads_kv + g];
      }
#pragma unroll 1
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
      if (lane == 0) after.temperature[int64_t{block} * heads_kv + g] = sum;
    }
  }
  __syncthreads();
  // use(row, channel of the own ones) with eight channels at a time.
  const int eights = static_cast<int>(a.eights.by);
  const auto over_own = [&](int rows, const auto& use) {
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * eights; i += kPairThreads) {
      const int r = a.eights(i);
      use(r, (i - r * eights) * 8);
    }
  };
  const PairBlock &q = a.first.block[0], &k = a.first.block[1];
  const auto channel_of = [&](int own) {
    return own < q.own() ? q.first + pair.rank * q.own() + own
                         : k.first + pair.rank * k.own() + own - q.own();
  };
  over_own(kRows + a.first.taps - 1, [&](int r, int own) {
    const uint4 x = pack_eight<T>(gather_taps(s_sums, a.room.sum_pitch, r, own, a.second.taps));
    *reinterpret_cast<uint4*>(s_du + r * a.room.du_pitch + own) = x;
    const RowAt at(begin + r, a.span);
    if (r >= kRows || begin + r >= a.all_rows || at.r >= a.u_rows) return;
    *reinterpret_cast<uint4*>(a.du.at<T>(at.b, at.r) + channel_of(own)) = x;
  });
  __syncthreads();
  convolve_back<T, false>(a.first, s_du, a.room.du_pitch, s_sums, a.room.sum_pitch, shared);
  __syncthreads();
  over_own(kRows, [&](int r, int own) {
    const TokenAt row = row_of(r);
    if (!row.is) return;
    const int channel = channel_of(own), head = a.by_dim(channel);
    Eight x = gather_taps(s_sums, a.room.sum_pitch, r, own, a.first.taps);
    add(x, coupling.share<T>(r, row.at, head, channel - head * coupling.dim));
    store_eight(a.dz.at<T>(row.at.b, row.at.r) + channel, x);
  });
}

}  // namespace fovea::layers::cuda
