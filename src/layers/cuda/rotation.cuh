// RoPE: where a row stands, and its channels turned.
//
// A head turns as y[i] = x[i] cos[i] + x[partner(i)] sin[i], with the sine of a pair's first
// channel negative, and 1 and 0 for channels that do not turn. Backward, the sines change sign.
#pragma once

#include <cmath>

#include "layers/cuda/prologue.h"
#include "layers/cuda/rows.cuh"

namespace fovea::layers::cuda {

struct Rotation {
  int turning = 0;
  bool half = true;              // channel i turns with i + turning / 2; otherwise 2 i with 2 i + 1
  double log2_step = 0;          // from a pair's frequency to the next
  const float* table = nullptr;  // as RopeTable::angles
  int64_t positions = 0;
  const int32_t* ids = nullptr;
  int64_t ids_batch = 0, ids_row = 0;  // strides
  int64_t first = 0;                   // of the rows, without ids

  static Rotation of(const RopeTable& rope, const RowPositions& at) {
    Rotation r;
    r.turning = static_cast<int>(rope.turning);
    r.half = rope.style == RopeStyle::kHalf;
    if (r.turning > 0) r.log2_step = -2 * std::log2(rope.base) / r.turning;
    r.table = rope.angles;
    r.positions = rope.angles != nullptr ? rope.positions : 0;
    r.first = at.first;
    if (at.ids.given()) {
      r.ids = static_cast<const int32_t*>(at.ids.data);
      r.ids_batch = at.ids.sizes[0] > 1 ? at.ids.strides[0] : 0;
      r.ids_row = at.ids.strides[1];
    }
    return r;
  }

  // cos and sin of channel i of a row's heads.
  __device__ __forceinline__ void angle(RowAt at, int i, float& cosine, float& sine) const {
    cosine = 1;
    sine = 0;
    if (i >= turning) return;
    angle_of_pair(at, pair_of_channel(i), cosine, sine);
    if (is_first(i)) sine = -sine;
  }

  // Those of channels i to i + 7, by all lanes of a warp, of the same row: each computes some
  // pairs' for all.
  __device__ __forceinline__ void angles(RowAt at, int i, Eight& cosines, Eight& sines) const {
#pragma unroll
    for (int n = 0; n < 8; ++n) cosines.x[n] = 1, sines.x[n] = 0;
    const int pairs = turning / 2;
    for (int first = 0; first < pairs; first += 32) {
      const int own = first + static_cast<int>(threadIdx.x) % 32;
      float cosine = 1, sine = 0;
      if (own < pairs) angle_of_pair(at, own, cosine, sine);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int from = pair_of_channel(i + n) - first;
        const float c = __shfl_sync(0xffffffffu, cosine, from);
        const float s = __shfl_sync(0xffffffffu, sine, from);
        if (i + n >= turning || from < 0 || from >= 32) continue;
        cosines.x[n] = c;
        sines.x[n] = is_first(i + n) ? -s : s;
      }
    }
  }

  __device__ __forceinline__ bool is_first(int i) const {
    return half ? i < turning / 2 : i % 2 == 0;
  }
  __device__ __forceinline__ int pair_of_channel(int i) const {
    return half ? i - (is_first(i) ? 0 : turning / 2) : i / 2;
  }

  __device__ __forceinline__ void angle_of_pair(RowAt at, int pair, float& cosine,
                                                float& sine) const {
    const int pairs = turning / 2;
    const int64_t position = ids != nullptr ? ids[at.b * ids_batch + at.r * ids_row] : first + at.r;
    if (position >= 0 && position < positions) {
      cosine = table[position * turning + pair];
      sine = table[position * turning + pairs + pair];
    } else {
      // In turns, of which only the fraction counts: exact enough for any position.
      constexpr double kTurnsOfRadian = 0.15915494309189533577;
      const double turns = static_cast<double>(position) * kTurnsOfRadian * exp2(pair * log2_step);
      sincospif(static_cast<float>(2 * (turns - rint(turns))), &sine, &cosine);
    }
  }

  // The partners of channels i to i + 7 of a head, of which x is these and `head` all.
  template <typename T>
  __device__ __forceinline__ Eight partners(const Eight& x, const T* head, int i) const {
    if (!half) return {x.x[1], x.x[0], x.x[3], x.x[2], x.x[5], x.x[4], x.x[7], x.x[6]};
    const int pairs = turning / 2;
    if (pairs % 8 == 0) {
      return i >= turning ? x : load_eight(head + i + (i < pairs ? pairs : -pairs));
    }
    Eight y;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int at = i + n;
      y.x[n] = ptx::to_float(head[at >= turning ? at : at + (at < pairs ? pairs : -pairs)]);
    }
    return y;
  }
};

}  // namespace fovea::layers::cuda
