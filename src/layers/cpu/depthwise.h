// Convolutions of each channel by itself; wider groups are products of matrices.
#pragma once

#include "layers/cpu/element.h"
#include "layers/cpu/kernels.h"

namespace fovea::FOVEA_ISA {

using layers::cpu::DepthwiseRows;

// y[t] (+)= sum_j weight[j] x[t + j] + bias. With a negative step, x[t - j]: the way back.
// `worker`: the weights by tap, [taps, dim], and one row of sums.
template <typename T>
void depthwise_rows(const DepthwiseRows& a, int64_t begin, int64_t end, std::byte* worker) {
  using R = Real<T>;
  const int64_t dim = a.y.dim;
  const T* const bias = static_cast<const T*>(a.bias);
  R* const __restrict weight = reinterpret_cast<R*>(worker);
  R* const __restrict sums = weight + a.taps * dim;
  for (int64_t j = 0; j < a.taps; ++j) {
    for (int64_t c = 0; c < dim; ++c) {
      weight[j * dim + c] = value_of(static_cast<const T*>(a.weight)[c * a.taps + j]);
    }
  }
  for (int64_t row = begin; row < end; ++row) {
    const T* const x = static_cast<const T*>(a.x.data) + a.x.at(row);
    T* const y = static_cast<T*>(a.y.data) + a.y.at(row);
    for (int64_t c = 0; c < dim; ++c) sums[c] = bias == nullptr ? R{0} : value_of(bias[c]);
    for (int64_t j = 0; j < a.taps; ++j) {
      const T* const tap = x + j * a.step;
      for (int64_t c = 0; c < dim; ++c) sums[c] += weight[j * dim + c] * value_of(tap[c]);
    }
    if (a.add) {
      for (int64_t c = 0; c < dim; ++c) put(y + c, value_of(y[c]) + sums[c]);
    } else {
      for (int64_t c = 0; c < dim; ++c) put(y + c, sums[c]);
    }
  }
}

// sums [taps, dim] of y[t] x[t + j] over these rows, y being the output's gradient.
template <typename T, typename S>
void depthwise_sums(const DepthwiseRows& a, int64_t begin, int64_t end, double* sums) {
  const int64_t dim = a.y.dim;
  for (int64_t i = 0; i < dim * a.taps; ++i) sums[i] = 0;
  for (int64_t row = begin; row < end; ++row) {
    const T* const dy = static_cast<const T*>(a.y.data) + a.y.at(row);
    for (int64_t j = 0; j < a.taps; ++j) {
      const T* const tap = static_cast<const T*>(a.x.data) + a.x.at(row) + j * a.step;
      for (int64_t c = 0; c < dim; ++c) {
        add_in(sums + j * dim + c,
               static_cast<S>(value_of(dy[c])) * static_cast<S>(value_of(tap[c])));
      }
    }
  }
}

}  // namespace fovea::FOVEA_ISA
