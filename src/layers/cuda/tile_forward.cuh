// The forward pass of layers of small heads in one kernel: a block takes tiles of tokens from z to
// q, k and v, for some of the heads.
#pragma once

#include "layers/cuda/tile_conv.cuh"

namespace fovea::layers::cuda {

// Where things lie in shared memory after the weights: bytes.
struct TileRoom {
  int pitch = 0;  // elements of a row
  int before = 0, after = 0, angles = 0, slopes = 0;

  static TileRoom of(int begin, int width, int heads_kv, int& bytes) {
    TileRoom room;
    room.pitch = width + kTilePadding;
    room.before = begin;
    room.after = room.before + kTileNearRows * room.pitch * 2;
    room.angles = room.after + kTileNearRows * room.pitch * 2;
    room.slopes = room.angles + kTileNearRows * kTilePairs * static_cast<int>(sizeof(float2));
    bytes = room.slopes + kTileTokens * heads_kv * 4;
    return room;
  }
};

// What both passes have.
struct Tiled {
  int blocks = 0;             // 0: not this way
  bool few = false;           // tiles, which blocks then share
  bool settled = false;       // weights may be read before earlier kernels have ended
  bool leaves_early = false;  // the next kernel may take the room beside its blocks
  bool begins = false;        // the first rows of z are zeros, which are to be stored
  int tiles = 0, q_len = 0, u_rows = 0;
  Divider tiles_of_member;
  Divider eights, fours;  // of a row of q and k, and of values
  TileHeads heads;
  TileWeights weights;
  TileRoom room;
  TileTurns turns;
  Values values;
  Coupling coupling;
  HeadNorm norm;
  Rows z, u, qk;        // z: from the first row that the first token reaches
  Rows keys, inverses;  // as Finish's
};

struct TileForward : Tiled {};

// The first convolution of all heads, a head at a time to each warp.
template <typename T>
__device__ __forceinline__ void convolve_heads(const TileForward& a, const T* s_z, T* s_u,
                                               const std::byte* shared) {
  constexpr int kM = (kTileTokens + kTileTaps - 1 + 15) / 16;
  const int lane = threadIdx.x % 32, pitch = a.room.pitch;
#pragma unroll 1
  for (int head = threadIdx.x / 32; head < a.heads.heads + a.heads.heads_kv; head += kTileWarps) {
    const bool is_k = head >= a.heads.heads;
    const TileWeight& w = a.weights.first(is_k);
    const T* const s_weight = reinterpret_cast<const T*>(shared + w.offset) +
                              (head - (is_k ? a.heads.heads : 0)) * kTileDim * w.pitch();
    ptx::Fragment sum[kM][2];
    multiply_taps<T, false>(sum, s_z + head * kTileDim, pitch, s_weight, w.pitch(), w.tap_size(),
                            1);
#pragma unroll
    for (int i = 0; i < kM * 4; ++i) {
      const int m = i / 4, y = i / 2 % 2, n = i % 2;
      *reinterpret_cast<uint32_t*>(s_u + (m * 16 + y * 8 + lane / 4) * pitch + head * kTileDim +
                                   n * 8 + lane % 4 * 2) =
          ptx::pack<T>(sum[m][n][2 * y], sum[m][n][2 * y + 1]);
    }
  }
}

// Coupling, norm, temperature and rotation of a head's fragments, of 16 kM tokens from `row` of the
// tile on; see Finish. A quad of lanes holds a token's head, a lane both channels of its pairs.
template <typename T, int kM>
__device__ __forceinline__ void finish_head(const TileForward& a, ptx::Fragment (&sum)[kM][2],
                                            const T* s_z, const float2* s_angles, int head, int b,
                                            int first, int row) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const bool is_k = head >= a.heads.heads;
  constexpr int kReach = 2 * (kTileTaps - 1);
  HeadShare(a.coupling, head)
      .add_to<T>(sum, s_z + (row + kReach) * a.room.pitch, a.room.pitch, head);
  const float length = a.norm.norm ? length_of<T>(a.norm, head, a.heads.heads) : 1;
  // Of the lane's first token; the others follow by eight rows.
  const int own = row + lane / 4, channel = head * kTileDim + quad * 2;
  T* const qk = a.qk.at<T>(b, first + own) + channel;
  T* const keys = a.keys.at<T>(b, first + own) + channel - a.heads.heads * kTileDim;
  float* const inverses = a.inverses.at<float>(b, first + own) + head;
  const bool keeps_key = is_k && a.keys.data != nullptr;
  const bool keeps_inverse = !is_k && quad == 0 && a.inverses.data != nullptr;
#pragma unroll
  for (int i = 0; i < kM * 2; ++i) {
    const int m = i / 2, y = i % 2, r = own + 8 * i;
    uint32_t words[2];
    float2 x[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      words[n] = ptx::pack<T>(sum[m][n][2 * y], sum[m][n][2 * y + 1]);
      x[n] = ptx::unpack<T>(words[n]);
    }
    float squares = x[0].x * x[0].x + x[0].y * x[0].y + x[1].x * x[1].x + x[1].y * x[1].y;
    squares += __shfl_xor_sync(0xffffffffu, squares, 1);
    squares += __shfl_xor_sync(0xffffffffu, squares, 2);
    if (first + r >= a.q_len) continue;
    if (keeps_key) {
      T* const to = keys + 8 * i * static_cast<int>(a.keys.row);
      *reinterpret_cast<uint32_t*>(to) = words[0];
      *reinterpret_cast<uint32_t*>(to + 8) = words[1];
    }
    const float inverse = inverse_length(squares), factor = a.norm.norm ? length * inverse : 1;
    if (keeps_inverse) inverses[8 * i * static_cast<int>(a.inverses.row)] = inverse;
    const float2* const angles = s_angles + r * kTilePairs;
    const auto turn = [&](float& p, float& q, const float2& angle) {
      const float turned = p * angle.x - q * angle.y;
      q = (q * angle.x + p * angle.y) * factor;
      p = turned * factor;
    };
    if (a.turns.half) {
      turn(x[0].x, x[1].x, angles[quad * 2]);
      turn(x[0].y, x[1].y, angles[quad * 2 + 1]);
    } else {
      turn(x[0].x, x[0].y, angles[quad]);
      turn(x[1].x, x[1].y, angles[quad + 4]);
    }
    T* const to = qk + 8 * i * static_cast<int>(a.qk.row);
    *reinterpret_cast<uint32_t*>(to) = ptx::pack<T>(x[0].x, x[0].y);
    *reinterpret_cast<uint32_t*>(to + 8) = ptx::pack<T>(x[1].x, x[1].y);
  }
}

// The second convolution of a block's own heads to their end, as over_heads.
template <typename T, int kM>
__device__ __forceinline__ int convolve_all(const TileForward& a, int part, const T* s_z,
                                            const T* s_u, const float2* s_angles,
                                            const std::byte* shared, int b, int first) {
  return over_heads<kTileTokens / 16 / kM, 16 * kM>(a.heads, part, [&](int head, int nth, int row) {
    const bool is_k = head >= a.heads.heads;
    const TileWeight& w = a.weights.second(is_k);
    const int in = is_k ? a.heads.heads * kTileDim : 0;
    const int out = is_k ? head - a.heads.heads : nth;
    ptx::Fragment sum[kM][2];
    multiply_taps<T, false>(
        sum, s_u + row * a.room.pitch + in, a.room.pitch,
        reinterpret_cast<const T*>(shared + w.offset) + out * kTileDim * w.pitch(), w.pitch(),
        w.tap_size(), w.row_eights / 2);
    finish_head<T>(a, sum, s_z, s_angles, head, b, first, row);
  });
}

template <typename T, bool kFew>
__global__ void __launch_bounds__(kTileThreads, 1)
    tile_forward_kernel(const __grid_constant__ TileForward a) {
  constexpr int kReach = 2 * (kTileTaps - 1);
  extern __shared__ __align__(128) std::byte shared[];
  T* const s_z = reinterpret_cast<T*>(shared + a.room.before);
  T* const s_u = reinterpret_cast<T*>(shared + a.room.after);
  float2* const s_angles = reinterpret_cast<float2*>(shared + a.room.angles);
  const int parts = a.heads.parts(), part = static_cast<int>(blockIdx.x) & (parts - 1);
  const int eights = static_cast<int>(a.eights.by), fours = static_cast<int>(a.fours.by);
  const int pitch = a.room.pitch;
  if (!a.settled) ptx::wait_for_earlier_kernels();
  load_weights(a.weights, part, shared);
  if (a.settled) ptx::wait_for_earlier_kernels();
  if (a.leaves_early) ptx::let_next_kernel_begin();

#pragma unroll 1
  for (int tile = static_cast<int>(blockIdx.x) >> a.heads.shift; tile < a.tiles;
       tile += static_cast<int>(gridDim.x) >> a.heads.shift) {
    const RowAt at(tile, a.tiles_of_member);
    const int b = at.b, first = at.r * kTileTokens;
    T* const z = a.z.at<T>(b, first);
#pragma unroll 3
    for (int i = threadIdx.x; i < (kTileTokens + kReach) * eights; i += kTileThreads) {
      const int r = a.eights(i), c = (i - r * eights) * 8;
      const bool zero = a.begins && first + r < kReach;
      const bool in = !zero && first + r < a.q_len + kReach;
      T* const from = z + (in || zero ? r : 0) * a.z.row + c;
      ptx::cp_async_16(ptx::shared_address(s_z + r * pitch + c), from, in ? 16 : 0);
      if (zero && part == 0) *reinterpret_cast<uint4*>(from) = uint4{};
    }
    ptx::cp_async_commit();
    a.turns.fill(s_angles, kTileTokens, b, first, a.q_len);
    ptx::cp_async_wait<0>();
    __syncthreads();
    convolve_heads<T>(a, s_z, s_u, shared);
    __syncthreads();
    // A weight that is read serves all rows of a warp: as many as leave enough warps with work.
    constexpr int kMany = kFew ? 2 : 4;
    const int units = kFew && a.heads.own_q <= 2
                          ? convolve_all<T, 1>(a, part, s_z, s_u, s_angles, shared, b, first)
                          : convolve_all<T, kMany>(a, part, s_z, s_u, s_angles, shared, b, first);
    // Rows of u up to the next tile's first, or to the last; blocks that share the tile take turns.
    const int rows = first + kTileTokens < a.q_len ? kTileTokens : a.u_rows - first;
    const int stored = a.u.data != nullptr ? (rows - part + parts - 1) >> a.heads.shift : 0;
    over_items(units, stored * eights, [&](int i) {
      const int n = a.eights(i), r = (n << a.heads.shift) + part, c = (i - n * eights) * 8;
      *reinterpret_cast<uint4*>(a.u.at<T>(b, first + r) + c) =
          *reinterpret_cast<const uint4*>(s_u + r * pitch + c);
    });
    over_items(units, (kTileTokens >> a.heads.shift) * fours, [&](int i) {
      const int n = a.fours(i), token = first + (n << a.heads.shift) + part;
      if (token < a.q_len) a.values.move<T>(RowAt(b, token), -1, (i - n * fours) * 4);
    });
    __syncthreads();
  }
}

}  // namespace fovea::layers::cuda
