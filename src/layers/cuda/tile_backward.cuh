// Backward of layers of small heads in one kernel, but for the gradients of weights: a block takes
// tiles of tokens from the gradients that attention leaves to z's, for some of the heads.
#pragma once

#include "layers/cuda/tile_forward.cuh"

namespace fovea::layers::cuda {

struct TileBackward : Tiled {
  Rows dqk, dmixed, du, dz;
  float* temperature = nullptr;  // [tiles, heads_kv]: sums of its gradient over a tile's tokens
};

constexpr int kTileMargin = kTileTaps - 1;

// Where a tile's tokens begin, in memory.
template <typename T>
struct TokensFrom {
  const T *dqk, *qk, *keys;
  const float* inverses;
  T* dmixed;

  __device__ __forceinline__ TokensFrom(const TileBackward& a, int b, int first)
      : dqk(a.dqk.at<T>(b, first)),
        qk(a.qk.at<T>(b, first)),
        keys(a.keys.at<T>(b, first) - a.heads.heads * kTileDim),
        inverses(a.inverses.at<float>(b, first)),
        dmixed(a.dmixed.at<T>(b, first)) {}
};

// Half of a head of a token: what it is made from, on its way.
template <typename T>
struct HalfHead {
  int row = 0, head = -1, half = 0;  // head -1: none
  bool live = false;                 // there is such a token
  RawEight<T> dy, x;
  float divided = 0;

  __device__ __forceinline__ void fetch(const TileBackward& a, const TokensFrom<T>& from, int item,
                                        int tokens) {
    constexpr int kRows = kTileTokens + 2 * kTileMargin;
    const int at = a.eights(item);
    if (at >= kRows) return;
    row = at;
    const int place = item - row * static_cast<int>(a.eights.by);
    head = place / 2;
    half = place % 2;
    live = row < tokens;
    if (!live) return;
    dy = load_raw(from.dqk + row * static_cast<int>(a.dqk.row) + place * 8);
    if (!a.norm.norm) return;
    if (head < a.heads.heads) {
      x = load_raw(from.qk + row * static_cast<int>(a.qk.row) + place * 8);
      divided = from.inverses[row * static_cast<int>(a.inverses.row) + head];
    } else {
      x = load_raw(from.keys + row * static_cast<int>(a.keys.row) + place * 8);
    }
  }

  // y turned back; lanes of both halves come together.
  __device__ __forceinline__ Eight turn_back(const RawEight<T>& raw, bool half_style,
                                             const float2* angles) const {
    const Eight y = eight_of(raw);
    Eight x;
    if (half_style) {
      RawEight<T> other;
      const auto swap = [](uint32_t word) { return __shfl_xor_sync(0xffffffffu, word, 1); };
      other.word[0] = {swap(raw.word[0].x), swap(raw.word[0].y), swap(raw.word[0].z),
                       swap(raw.word[0].w)};
      const Eight partners = eight_of(other);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 angle = angles[i];
        x.x[i] = y.x[i] * angle.x + partners.x[i] * (half == 0 ? angle.y : -angle.y);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const float2 angle = angles[half * 4 + i / 2];
        x.x[i] = y.x[i] * angle.x + y.x[i + 1] * angle.y;
        x.x[i + 1] = y.x[i + 1] * angle.x - y.x[i] * angle.y;
      }
    }
    return x;
  }

  // Its part of dmixed; `slope` gets the temperature's gradient. See token_backward.
  __device__ __forceinline__ Eight finish(const TileBackward& a, const float2* s_angles,
                                          float& slope) const {
    const bool is_q = head < a.heads.heads;
    const float2* const angles = s_angles + row * kTilePairs;
    Eight d = turn_back(dy, a.turns.half, angles);
    if (!a.norm.norm) return d;
    const Eight turned = turn_back(x, a.turns.half, angles);
    const Eight v = is_q ? turned : eight_of(x);
    float squares = dot(v, v), along = dot(v, d);
    squares += __shfl_xor_sync(0xffffffffu, squares, 1);
    along += __shfl_xor_sync(0xffffffffu, along, 1);
    const float inverse = inverse_length(squares);
    along *= inverse;
    const float by = is_q ? divided : inverse;
    const float factor = live ? length_of<T>(a.norm, head, a.heads.heads) : 0;
    // Below the shortest length the division is by a constant, which has no gradient.
    if (by < 1 / kShortest) add(d, v, -along * inverse);
    scale(d, factor * by);
    slope = along * (a.norm.kind == KeyTemperature::kPerHeadExp ? factor : a.norm.length);
    return d;
  }
};

// dmixed of a tile's tokens and of those that follow them, in shared memory from row kTileMargin
// on; of the block's own heads and the tile's tokens also in memory.
template <typename T>
__device__ __forceinline__ void mixed_gradients(const TileBackward& a, int part, T* s_dmixed,
                                                float2* s_angles, float* s_slopes, int b,
                                                int first) {
  constexpr int kRows = kTileTokens + 2 * kTileMargin, kAtOnce = 3;
  const int items = kRows * static_cast<int>(a.eights.by), heads = a.heads.heads;
  const TokensFrom<T> from(a, b, first);
#pragma unroll 1
  for (int begin = 0; begin < items; begin += kAtOnce * kTileThreads) {
    HalfHead<T> of[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      of[n].fetch(a, from, begin + n * kTileThreads + static_cast<int>(threadIdx.x),
                  a.q_len - first);
    }
    if (begin == 0) {  // while the first are on their way
      a.turns.fill(s_angles, kRows, b, first, a.q_len);
      __syncthreads();
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const HalfHead<T>& h = of[n];
      float slope = 0;
      const Eight d = h.finish(a, s_angles, slope);
      if (h.head < 0) continue;
      const uint4 packed = h.live ? pack_eight<T>(d) : uint4{};
      const int channel = h.head * kTileDim + h.half * 8;
      *reinterpret_cast<uint4*>(s_dmixed + (kTileMargin + h.row) * a.room.pitch + channel) = packed;
      if (h.row >= kTileTokens) continue;
      if (h.live && a.heads.owns(part, h.head)) {
        *reinterpret_cast<uint4*>(from.dmixed + h.row * static_cast<int>(a.dmixed.row) + channel) =
            packed;
      }
      if (h.head >= heads && h.half == 0) {
        s_slopes[h.row * a.heads.heads_kv + h.head - heads] = h.live ? slope : 0;
      }
    }
  }
}

// Back through the second convolution to du of a block's own heads, as over_heads.
template <typename T, int kM>
__device__ __forceinline__ int convolve_all_back(const TileBackward& a, int part, const T* s_dmixed,
                                                 T* s_du, const std::byte* shared, int b,
                                                 int first) {
  constexpr int kPieces = 5 / kM;  // of the tile's rows with those that follow, and two before
  const int lane = threadIdx.x % 32, pitch = a.room.pitch;
  return over_heads<kPieces, 16 * kM>(a.heads, part, [&](int head, int nth, int row) {
    const bool is_k = head >= a.heads.heads;
    const TileWeight& w = a.weights.second(is_k);
    const int out = is_k ? a.heads.heads * kTileDim : 0;
    const int in = is_k ? head - a.heads.heads : nth;
    T* const du = a.du.at<T>(b, first + row + lane / 4) + head * kTileDim + lane % 4 * 2;
    ptx::Fragment sum[kM][2];
    multiply_taps<T, true>(sum, s_dmixed + row * pitch + out, pitch,
                           reinterpret_cast<const T*>(shared + w.offset) + in * kTileDim, w.pitch(),
                           w.tap_size(), w.rows / 16);
#pragma unroll
    for (int i = 0; i < kM * 4; ++i) {
      const int m = i / 4, y = i / 2 % 2, n = i % 2, r = row + m * 16 + y * 8 + lane / 4;
      const int channel = head * kTileDim + n * 8 + lane % 4 * 2;
      const uint32_t x = ptx::pack<T>(sum[m][n][2 * y], sum[m][n][2 * y + 1]);
      *reinterpret_cast<uint32_t*>(s_du + r * pitch + channel) = x;
      // The first rows are those of the tile before, if there is one.
      const bool own = r < kTileMargin ? first == 0 : r < kTileMargin + kTileTokens;
      if (own && first + r < a.u_rows) {
        *reinterpret_cast<uint32_t*>(du + (m * 16 + y * 8) * static_cast<int>(a.du.row) + n * 8) =
            x;
      }
    }
  });
}

// Back through the first convolution to dz, with what comes by the coupling.
template <typename T, int kM>
__device__ __forceinline__ void convolve_heads_back(const TileBackward& a, int part,
                                                    const T* s_dmixed, const T* s_du,
                                                    const std::byte* shared, int b, int first) {
  const int lane = threadIdx.x % 32, pitch = a.room.pitch;
  over_heads<kTileTokens / 16 / kM, 16 * kM>(a.heads, part, [&](int head, int nth, int row) {
    const bool is_k = head >= a.heads.heads;
    const TileWeight& w = a.weights.first(is_k);
    const int at = is_k ? head - a.heads.heads : nth;
    T* const dz = a.dz.at<T>(b, first + row + lane / 4) + head * kTileDim + lane % 4 * 2;
    ptx::Fragment sum[kM][2];
    multiply_taps<T, true>(
        sum, s_du + (row + kTileMargin) * pitch + head * kTileDim, pitch,
        reinterpret_cast<const T*>(shared + w.offset) + at * kTileDim * w.pitch(), w.pitch(),
        w.tap_size(), 1);
    HeadShare(a.coupling, head).add_to<T>(sum, s_dmixed + (row + kTileMargin) * pitch, pitch, head);
#pragma unroll
    for (int i = 0; i < kM * 4; ++i) {
      const int m = i / 4, y = i / 2 % 2, n = i % 2;
      if (first + row + m * 16 + y * 8 + lane / 4 >= a.q_len) continue;
      *reinterpret_cast<uint32_t*>(dz + (m * 16 + y * 8) * static_cast<int>(a.dz.row) + n * 8) =
          ptx::pack<T>(sum[m][n][2 * y], sum[m][n][2 * y + 1]);
    }
  });
}

template <typename T, bool kFew>
__global__ void __launch_bounds__(kTileThreads, 1)
    tile_backward_kernel(const __grid_constant__ TileBackward a) {
  extern __shared__ __align__(128) std::byte shared[];
  T* const s_dmixed = reinterpret_cast<T*>(shared + a.room.before);
  T* const s_du = reinterpret_cast<T*>(shared + a.room.after);
  float2* const s_angles = reinterpret_cast<float2*>(shared + a.room.angles);
  float* const s_slopes = reinterpret_cast<float*>(shared + a.room.slopes);
  const int parts = a.heads.parts(), part = static_cast<int>(blockIdx.x) & (parts - 1);
  const int fours = static_cast<int>(a.fours.by);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, heads_kv = a.heads.heads_kv;
  if (!a.settled) ptx::wait_for_earlier_kernels();
  load_weights(a.weights, part, shared);
  // What the rows before the first token would be; see convolve_all_back.
  for (int i = threadIdx.x; i < kTileMargin * a.room.pitch / 8; i += kTileThreads) {
    reinterpret_cast<uint4*>(s_dmixed)[i] = uint4{};
  }
  if (a.settled) ptx::wait_for_earlier_kernels();
  if (a.leaves_early) ptx::let_next_kernel_begin();

#pragma unroll 1
  for (int tile = static_cast<int>(blockIdx.x) >> a.heads.shift; tile < a.tiles;
       tile += static_cast<int>(gridDim.x) >> a.heads.shift) {
    const RowAt at(tile, a.tiles_of_member);
    const int b = at.b, first = at.r * kTileTokens;
    mixed_gradients<T>(a, part, s_dmixed, s_angles, s_slopes, b, first);
    __syncthreads();
    constexpr int kRows = kFew ? 1 : 5;  // fragments of them to a warp
    const int units = convolve_all_back<T, kRows>(a, part, s_dmixed, s_du, shared, b, first);
    over_items(units, (kTileTokens >> a.heads.shift) * fours, [&](int i) {
      const int n = a.fours(i), token = first + (n << a.heads.shift) + part;
      if (token < a.q_len) a.values.move<T>(RowAt(b, token), 1, (i - n * fours) * 4);
    });
    if (a.temperature != nullptr && part == 0 && warp == kTileWarps - 1) {
#pragma unroll 1
      for (int g = 0; g < heads_kv; ++g) {
        float sum = s_slopes[lane * heads_kv + g] + s_slopes[(lane + 32) * heads_kv + g];
#pragma unroll
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (lane == 0) a.temperature[int64_t{tile} * heads_kv + g] = sum;
      }
    }
    __syncthreads();
    convolve_heads_back<T, kFew ? 1 : 4>(a, part, s_dmixed, s_du, shared, b, first);
    __syncthreads();
  }
}

}  // namespace fovea::layers::cuda
