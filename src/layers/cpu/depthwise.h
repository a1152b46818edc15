// Convolutions of each channel by itself; wider groups are products of matrices.
#pragma once

#include "layers/cpu/element.h"
#include "layers/cpu/kernels.h"

namespace fovea::FOVEA_ISA {

using layers::cpu::DepthwiseRows;

// y[t] (+)= sum_j weight[j] x[t + j] + bias. With a negative step, x[t - j]: the way back.
template <typename T>
void depthwise_rows(const DepthwiseRows& a, int64_t begin, int64_t end) {
  using R = Real<T>;
  const T* const weight = static_cast<const T*>(a.weight);
  const T* const bias = static_cast<const T*>(a.bias);
  for (int64_t row = begin; row < end; ++row) {
    const T* const x = static_cast<const T*>(a.x.data) + a.x.at(row);
    T* const y = static_cast<T*>(a.y.data) + a.y.at(row);
    for (int64_t c = 0; c < a.y.dim; ++c) {
      R sum = bias == nullptr ? R{0} : value_of(bias[c]);
      for (int64_t j = 0; j < a.taps; ++j) {
        sum += value_of(weight[c * a.taps + j]) * value_of(x[j * a.step + c]);
      }
      put(y + c, a.add ? value_of(y[c]) + sum : sum);
    }
  }
}

// sums [dim, taps] of y[t] x[t + j] over these rows, y being the output's gradient.
template <typename T>
void depthwise_sums(const DepthwiseRows& a, int64_t begin, int64_t end, double* sums) {
  for (int64_t i = 0; i < a.y.dim * a.taps; ++i) sums[i] = 0;
  for (int64_t row = begin; row < end; ++row) {
    const T* const x = static_cast<const T*>(a.x.data) + a.x.at(row);
    const T* const dy = static_cast<const T*>(a.y.data) + a.y.at(row);
    for (int64_t c = 0; c < a.y.dim; ++c) {
      for (int64_t j = 0; j < a.taps; ++j) {
        sums[c * a.taps + j] +=
            static_cast<double>(value_of(dy[c])) * static_cast<double>(value_of(x[j * a.step + c]));
      }
    }
  }
}

}  // namespace fovea::FOVEA_ISA
