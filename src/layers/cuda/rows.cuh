// Rows of tensors as the prologue's kernels see them, and neighbouring values two at a time.
#pragma once

#include "fovea/tensor.h"
#include "prim/cuda/ptx/math.cuh"

namespace fovea::layers::cuda {

// Of a tensor [batch, rows, cols].
struct Rows {
  void* data = nullptr;
  int64_t batch = 0, row = 0;  // strides, in elements

  template <typename T>
  __device__ __forceinline__ T* at(int b, int r) const {
    return static_cast<T*>(data) + b * batch + r * row;
  }
};

// From row `first` and column `column` on.
inline Rows rows_of(const TensorView& t, int64_t first = 0, int64_t column = 0) {
  const int64_t begin = first * t.strides[1] + column;
  return {static_cast<std::byte*>(t.data) + begin * dtype_bytes(t.dtype), t.strides[0],
          t.strides[1]};
}

// A row by its number through the batch, each member having `rows` of them.
struct RowAt {
  int b, r;
  __device__ __forceinline__ RowAt(int number, int rows) : b(number / rows), r(number % rows) {}
};

template <typename T>
__device__ __forceinline__ float2 load_pair(const T* from) {
  if constexpr (sizeof(T) == 4) {
    return *reinterpret_cast<const float2*>(from);
  } else {
    return ptx::unpack<T>(*reinterpret_cast<const uint32_t*>(from));
  }
}

template <typename T>
__device__ __forceinline__ void store_pair(T* to, float2 x) {
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float2*>(to) = x;
  } else {
    *reinterpret_cast<uint32_t*>(to) = ptx::pack<T>(x.x, x.y);
  }
}

// As memory of type T will hold it.
template <typename T>
__device__ __forceinline__ float2 round_pair(float2 x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else {
    return ptx::unpack<T>(ptx::pack<T>(x.x, x.y));
  }
}

__device__ __forceinline__ float2 operator+(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
__device__ __forceinline__ float2 operator*(float a, float2 b) { return {a * b.x, a * b.y}; }

}  // namespace fovea::layers::cuda
