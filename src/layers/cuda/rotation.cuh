// RoPE: where a row stands, and its channels turned.
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

  // cos and sin of a pair, into a row's angles [2, turning / 2].
  __device__ void set_angle(RowAt at, int pair, float* angles) const {
    const int pairs = turning / 2;
    const int64_t position = ids != nullptr ? ids[at.b * ids_batch + at.r * ids_row] : first + at.r;
    if (position >= 0 && position < positions) {
      angles[pair] = table[position * turning + pair];
      angles[pairs + pair] = table[position * turning + pairs + pair];
      return;
    }
    // In turns, of which only the fraction counts: exact enough for any position.
    constexpr double kTurnsOfRadian = 0.15915494309189533577;
    const double turns = static_cast<double>(position) * kTurnsOfRadian * exp2(pair * log2_step);
    sincospif(static_cast<float>(2 * (turns - rint(turns))), angles + pairs + pair, angles + pair);
  }

  // Channel `i` of a turned head; value(i) is a channel of it before, sign -1 turns back.
  template <typename Value>
  __device__ __forceinline__ float turned(int i, const float* angles, float sign,
                                          Value value) const {
    const float x = value(i);
    if (i >= turning) return x;
    const int pairs = turning / 2;
    const bool is_first = half ? i < pairs : i % 2 == 0;
    const int pair = half ? i - (is_first ? 0 : pairs) : i / 2;
    const float other = value(half ? i + (is_first ? pairs : -pairs) : i ^ 1);
    return fmaf(x, angles[pair], other * ((is_first ? -sign : sign) * angles[pairs + pair]));
  }
};

}  // namespace fovea::layers::cuda
