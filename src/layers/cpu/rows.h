// Copies of rows, and sums over heads and over rows.
#pragma once

#include "layers/cpu/element.h"
#include "layers/cpu/kernels.h"

namespace fovea::FOVEA_ISA {

template <typename T>
void copy_rows(const layers::cpu::CopyRows& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t h = 0; h < a.from.heads; ++h) {
      const T* const from =
          static_cast<const T*>(a.from.data) + a.from.at(row) + h * a.from.head_stride;
      T* const to = static_cast<T*>(a.to.data) + a.to.at(row) + h * a.to.head_stride;
      for (int64_t i = 0; i < a.from.dim; ++i) to[i] = from[i];
    }
  }
}

template <typename T>
void sum_heads(const layers::cpu::CopyRows& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* const from = static_cast<const T*>(a.from.data) + a.from.at(row);
    T* const to = static_cast<T*>(a.to.data) + a.to.at(row);
    for (int64_t i = 0; i < a.from.dim; ++i) {
      Real<T> sum = 0;
      for (int64_t h = 0; h < a.from.heads; ++h) sum += value_of(from[h * a.from.head_stride + i]);
      put(to + i, sum);
    }
  }
}

template <typename T, typename S>
void column_sums(const layers::cpu::HeadRows& x, int64_t begin, int64_t end, double* sums) {
  for (int64_t i = 0; i < x.dim; ++i) sums[i] = 0;
  for (int64_t row = begin; row < end; ++row) {
    const T* const from = static_cast<const T*>(x.data) + x.at(row);
    for (int64_t i = 0; i < x.dim; ++i) add_in(sums + i, static_cast<S>(value_of(from[i])));
  }
}

template <typename T>
void store_sums(const double* sums, int64_t count, void* to, int64_t stride) {
  for (int64_t i = 0; i < count; ++i) {
    put(static_cast<T*>(to) + i * stride, static_cast<Real<T>>(sums[i]));
  }
}

}  // namespace fovea::FOVEA_ISA
