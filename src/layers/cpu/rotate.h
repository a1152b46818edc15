// RoPE: pairs of channels turned by an angle that grows with the row's position.
#pragma once

#include <cmath>
#include <concepts>

#include "layers/cpu/element.h"
#include "layers/cpu/kernels.h"
#include "prim/cpu/simd.h"

namespace fovea::FOVEA_ISA {

using layers::cpu::Pairing;
using layers::cpu::RotateRows;
using layers::cpu::Rotation;

// cos and sin of all pairs at one position: [2, turning / 2].
template <typename R>
void angles_at(const Rotation& rotation, double position, R* to) {
  const int64_t pairs = rotation.turning / 2;
  for (int64_t i = 0; i < pairs; ++i) {
    const double exponent = -2.0 * static_cast<double>(i) / static_cast<double>(rotation.turning);
    const double angle = position * ::pow(rotation.base, exponent);
    to[i] = static_cast<R>(::cos(angle));
    to[pairs + i] = static_cast<R>(::sin(angle));
  }
}

template <typename T>
void fill_rotation(const Rotation& rotation, void* table) {
  for (int64_t p = 0; p < rotation.positions; ++p) {
    angles_at(rotation, static_cast<double>(p),
              static_cast<Real<T>*>(table) + p * rotation.turning);
  }
}

// The angles of a row: from the table, or made in `own` for a position beyond it.
template <typename R>
FOVEA_INLINE const R* row_angles(const Rotation& rotation, int64_t b, int64_t i, R* own) {
  const int64_t position = rotation.ids != nullptr
                               ? rotation.ids[b * rotation.ids_batch + i * rotation.ids_row]
                               : rotation.first + i;
  if (position >= 0 && position < rotation.positions) {
    return static_cast<const R*>(rotation.table) + position * rotation.turning;
  }
  angles_at(rotation, static_cast<double>(position), own);
  return own;
}

// from and to may be the same head.
template <typename T, typename R>
FOVEA_INLINE void turn_head(const T* from, T* to, const Rotation& rotation, const R* angles) {
  const int64_t pairs = rotation.turning / 2;
  const R sign = static_cast<R>(rotation.sign);
  const bool half = rotation.pairing == Pairing::kHalf;
  const int64_t step = half ? 1 : 2, other = half ? pairs : 1;
  int64_t i = 0;
  if constexpr (std::same_as<R, float>) {
    for (; half && i + kLanes <= pairs; i += kLanes) {
      const Vec x = load(from + i), y = load(from + i + pairs);
      const Vec c = load(angles + i), s = broadcast(sign) * load(angles + pairs + i);
      store(to + i, x * c - y * s);
      store(to + i + pairs, x * s + y * c);
    }
  }
  for (; i < pairs; ++i) {
    const R x = value_of(from[i * step]), y = value_of(from[i * step + other]);
    const R c = angles[i], s = sign * angles[pairs + i];
    put(to + i * step, x * c - y * s);
    put(to + i * step + other, x * s + y * c);
  }
}

template <typename T>
void rotate_rows(const RotateRows& a, int64_t begin, int64_t end, std::byte* worker) {
  auto* const own = reinterpret_cast<Real<T>*>(worker);
  for (int64_t row = begin; row < end; ++row) {
    const Real<T>* const angles = row_angles(a.rotation, row / a.x.rows, row % a.x.rows, own);
    T* const x = static_cast<T*>(a.x.data) + a.x.at(row);
    for (int64_t h = 0; h < a.x.heads; ++h) {
      turn_head(x + h * a.x.head_stride, x + h * a.x.head_stride, a.rotation, angles);
    }
  }
}

}  // namespace fovea::FOVEA_ISA
