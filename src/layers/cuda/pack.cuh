// Weights of convolutions with their taps outermost, as products over taps read them.
#pragma once

#include "layers/cuda/rows.cuh"

namespace fovea::layers::cuda {

// From [channels, group, taps]: to [taps, channels, group], or backward, within each group
// transposed and the last tap first.
struct Pack {
  const void* from = nullptr;
  void* to = nullptr;
  int taps = 0, channels = 0, group = 0;
  bool backward = false;
  int tiles = 0;
};

constexpr int kMostPacks = 6;
struct Packs {
  int count = 0, tiles = 0;
  Pack pack[kMostPacks];

  void add(const void* from, void* to, int taps, int channels, int group, bool backward);
};

constexpr int kPackTile = 32;  // channels in and out

inline void Packs::add(const void* from, void* to, int taps, int channels, int group,
                       bool backward) {
  const int across = (group + kPackTile - 1) / kPackTile;
  const int tiles_of_it = channels / group * across * across;
  pack[count++] = {from, to, taps, channels, group, backward, tiles_of_it};
  tiles += tiles_of_it;
}

// The tile `id` of all packs, by a block of 256 threads. A few taps at a time, whose loads do not
// wait for each other.
template <typename T>
__device__ void pack_tile(const Packs& packs, int id) {
  constexpr int kTaps = 4, kRowStep = 256 / kPackTile;
  __shared__ T s_tile[kTaps][kPackTile][kPackTile + 2];
  int n = 0;
  while (id >= packs.pack[n].tiles) id -= packs.pack[n++].tiles;
  const Pack& p = packs.pack[n];
  const int across = (p.group + kPackTile - 1) / kPackTile;
  const int first = id / (across * across) * p.group;  // channel of the group
  const int out = id / across % across * kPackTile, in = id % across * kPackTile;
  const int x = threadIdx.x % kPackTile, row = threadIdx.x / kPackTile;
  const T* const from = static_cast<const T*>(p.from);
  T* const to = static_cast<T*>(p.to);
  for (int begin = 0; begin < p.taps; begin += kTaps) {
    const int taps = min(kTaps, p.taps - begin);
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
#pragma unroll
      for (int y = row; y < kPackTile; y += kRowStep) {
        if (tap < taps && out + y < p.group && in + x < p.group) {
          s_tile[tap][y][x] =
              from[(int64_t{first + out + y} * p.group + in + x) * p.taps + begin + tap];
        }
      }
    }
    __syncthreads();
    for (int tap = 0; tap < taps; ++tap) {
      const int place = p.backward ? p.taps - 1 - begin - tap : begin + tap;
      for (int y = row; y < kPackTile; y += kRowStep) {
        const int o = (p.backward ? in : out) + y, i = (p.backward ? out : in) + x;
        if (o >= p.group || i >= p.group) continue;
        to[(int64_t{place} * p.channels + first + o) * p.group + i] =
            p.backward ? s_tile[tap][x][y] : s_tile[tap][y][x];
      }
    }
    __syncthreads();
  }
}

}  // namespace fovea::layers::cuda
