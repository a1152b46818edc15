// Loads and stores of neighbouring elements, and where a head begins.
#pragma once

#include <cstring>

#include "layers/cuda/head_rows.h"
#include "prim/cuda/ptx/math.cuh"
#include "prim/cuda/ptx/st_global.cuh"

namespace fovea::layers::cuda {

// A head's first element; rows are numbered through the batch.
template <typename T>
__device__ __forceinline__ T* head_at(const HeadRows& t, int64_t row, int64_t head) {
  return static_cast<T*>(t.data) + row / t.rows * t.batch_stride + row % t.rows * t.row_stride +
         head * t.head_stride;
}

// Elements that are moved at once: 16 bytes where rows allow it, otherwise one.
template <typename T>
constexpr int kWide = 16 / sizeof(T);

template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Vector {
  T x[kWidth];
};

template <int kWidth, typename T>
__device__ __forceinline__ void load_floats(const T* from, float (&to)[kWidth]) {
  const auto vector = *reinterpret_cast<const Vector<T, kWidth>*>(from);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) to[i] = ptx::to_float(vector.x[i]);
}

template <int kWidth, typename T>
__device__ __forceinline__ void store_floats(const float (&from)[kWidth], T* to) {
  Vector<T, kWidth> vector;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) vector.x[i] = ptx::from_float<T>(from[i]);
  if constexpr (sizeof(vector) == 16) {  // by itself the compiler would take it apart
    uint4 word;
    memcpy(&word, &vector, sizeof(word));
    ptx::store_16(to, word);
  } else {
    *reinterpret_cast<Vector<T, kWidth>*>(to) = vector;
  }
}

}  // namespace fovea::layers::cuda
