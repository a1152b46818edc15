// RMS and layer norm over the channels of a head, and their gradients.
#pragma once

#include "layers/cpu/element.h"
#include "layers/cpu/kernels.h"

namespace fovea::FOVEA_ISA {

using layers::cpu::HeadRows;
using layers::cpu::NormKind;
using layers::cpu::NormRows;

// What a head is shifted and scaled by: xhat = (x - mean) * inverse.
template <typename R>
struct NormStats {
  R mean = 0;
  R inverse = 0;
};

template <typename T>
FOVEA_INLINE NormStats<Real<T>> stats_of(const T* x, const NormRows& a) {
  using R = Real<T>;
  const int64_t dim = a.x.dim;
  const R count = static_cast<R>(dim);
  NormStats<R> stats;
  if (a.kind == NormKind::kLayer) {
    for (int64_t i = 0; i < dim; ++i) stats.mean += value_of(x[i]);
    stats.mean /= count;
  }
  R squares = 0;
  for (int64_t i = 0; i < dim; ++i) {
    const R centred = value_of(x[i]) - stats.mean;
    squares += centred * centred;
  }
  stats.inverse = R{1} / root(squares / count + static_cast<R>(a.eps));
  return stats;
}

template <typename T>
FOVEA_INLINE Real<T> weight_at(const void* weight, int64_t i) {
  return weight == nullptr ? Real<T>{1} : value_of(static_cast<const T*>(weight)[i]);
}

template <typename T>
void normalise_rows(const NormRows& a, int64_t begin, int64_t end) {
  using R = Real<T>;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t h = 0; h < a.x.heads; ++h) {
      const T* const x = static_cast<const T*>(a.x.data) + a.x.at(row) + h * a.x.head_stride;
      T* const y = static_cast<T*>(a.y.data) + a.y.at(row) + h * a.y.head_stride;
      const NormStats<R> stats = stats_of(x, a);
      for (int64_t i = 0; i < a.x.dim; ++i) {
        const R shift = a.bias == nullptr ? R{0} : value_of(static_cast<const T*>(a.bias)[i]);
        const R xhat = (value_of(x[i]) - stats.mean) * stats.inverse;
        put(y + i, xhat * weight_at<T>(a.weight, i) + shift);
      }
    }
  }
}

// dx = inverse * (g - mean(g) - xhat * mean(g xhat)) with g = dy * weight; RMS has no mean(g).
template <typename T, typename S>
void normalise_rows_backward(const NormRows& a, int64_t begin, int64_t end, double* sums) {
  using R = Real<T>;
  const int64_t dim = a.x.dim;
  const R count = static_cast<R>(dim);
  for (int64_t i = 0; i < 2 * dim; ++i) sums[i] = 0;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t h = 0; h < a.x.heads; ++h) {
      const T* const x = static_cast<const T*>(a.x.data) + a.x.at(row) + h * a.x.head_stride;
      const T* const dy = static_cast<const T*>(a.dy.data) + a.dy.at(row) + h * a.dy.head_stride;
      T* const dx = static_cast<T*>(a.dx.data) + a.dx.at(row) + h * a.dx.head_stride;
      const NormStats<R> stats = stats_of(x, a);
      R mean = 0, along = 0;
      for (int64_t i = 0; i < dim; ++i) {
        const R g = value_of(dy[i]) * weight_at<T>(a.weight, i);
        const R xhat = (value_of(x[i]) - stats.mean) * stats.inverse;
        mean += g;
        along += g * xhat;
      }
      mean = a.kind == NormKind::kLayer ? mean / count : R{0};
      along /= count;
      for (int64_t i = 0; i < dim; ++i) {
        const R given = value_of(dy[i]);
        const R xhat = (value_of(x[i]) - stats.mean) * stats.inverse;
        add_in(sums + i, static_cast<S>(given * xhat));
        add_in(sums + dim + i, static_cast<S>(given));
        put(dx + i, stats.inverse * (given * weight_at<T>(a.weight, i) - mean - xhat * along));
      }
    }
  }
}

}  // namespace fovea::FOVEA_ISA
