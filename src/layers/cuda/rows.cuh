// Rows of tensors as the prologue's kernels see them, and eight neighbouring values at a time.
#pragma once

#include <bit>

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

// Divides what is not negative by what is known before a launch.
struct Divider {
  unsigned by = 1, magic = 0, shift = 0;

  Divider() = default;
  explicit Divider(int divisor) : by(static_cast<unsigned>(divisor)) {
    if (by <= 1) return;
    shift = static_cast<unsigned>(std::bit_width(by - 1)) - 1;
    magic = static_cast<unsigned>(((uint64_t{1} << (32 + shift)) + by - 1) / by);
  }
  __device__ __forceinline__ int operator()(int n) const {
    return by == 1 ? n : static_cast<int>(__umulhi(static_cast<unsigned>(n), magic) >> shift);
  }
};

// A row by its number through the batch, each member having as many as `rows` divides by.
struct RowAt {
  int b, r;
  __device__ __forceinline__ RowAt(int member, int row) : b(member), r(row) {}
  __device__ __forceinline__ RowAt(int number, const Divider& rows) : b(rows(number)) {
    r = number - b * static_cast<int>(rows.by);
  }
};

struct Eight {
  float x[8];
};

// Eight values as they lie in memory: on their way while others are worked on.
template <typename T>
struct RawEight {
  uint4 word[sizeof(T) / 2] = {};
};
template <typename T>
__device__ __forceinline__ RawEight<T> load_raw(const T* from) {
  RawEight<T> raw;
#pragma unroll
  for (int n = 0; n < static_cast<int>(sizeof(T) / 2); ++n) {
    raw.word[n] = reinterpret_cast<const uint4*>(from)[n];
  }
  return raw;
}
template <typename T>
__device__ __forceinline__ Eight eight_of(const RawEight<T>& raw) {
  const uint4 a = raw.word[0];
  if constexpr (sizeof(T) == 4) {
    const uint4 b = raw.word[1];
    return {__uint_as_float(a.x), __uint_as_float(a.y), __uint_as_float(a.z), __uint_as_float(a.w),
            __uint_as_float(b.x), __uint_as_float(b.y), __uint_as_float(b.z), __uint_as_float(b.w)};
  } else {
    const float2 x = ptx::unpack<T>(a.x), y = ptx::unpack<T>(a.y), z = ptx::unpack<T>(a.z),
                 w = ptx::unpack<T>(a.w);
    return {x.x, x.y, y.x, y.y, z.x, z.y, w.x, w.y};
  }
}

template <typename T>
__device__ __forceinline__ Eight load_eight(const T* from) {
  return eight_of(load_raw(from));
}

// Of an address that need not be a multiple of anything.
template <typename T>
__device__ __forceinline__ Eight load_eight_apart(const T* from, int step = 1) {
  Eight a;
#pragma unroll
  for (int i = 0; i < 8; ++i) a.x[i] = ptx::to_float(from[i * step]);
  return a;
}

// As 16-bit values.
template <typename T>
__device__ __forceinline__ uint4 pack_eight(const Eight& a) {
  const auto& x = a.x;
  return {ptx::pack<T>(x[0], x[1]), ptx::pack<T>(x[2], x[3]), ptx::pack<T>(x[4], x[5]),
          ptx::pack<T>(x[6], x[7])};
}
template <typename T>
__device__ __forceinline__ void store_eight(T* to, const Eight& a) {
  const auto& x = a.x;
  if constexpr (sizeof(T) == 4) {
    reinterpret_cast<float4*>(to)[0] = {x[0], x[1], x[2], x[3]};
    reinterpret_cast<float4*>(to)[1] = {x[4], x[5], x[6], x[7]};
  } else {
    *reinterpret_cast<uint4*>(to) = pack_eight<T>(a);
  }
}

// a += factor * b.
__device__ __forceinline__ void add(Eight& a, const Eight& b, float factor = 1) {
#pragma unroll
  for (int i = 0; i < 8; ++i) a.x[i] = fmaf(factor, b.x[i], a.x[i]);
}
__device__ __forceinline__ void add_product(Eight& a, const Eight& b, const Eight& c) {
#pragma unroll
  for (int i = 0; i < 8; ++i) a.x[i] = fmaf(b.x[i], c.x[i], a.x[i]);
}
__device__ __forceinline__ void scale(Eight& a, float factor) {
#pragma unroll
  for (int i = 0; i < 8; ++i) a.x[i] *= factor;
}
__device__ __forceinline__ float dot(const Eight& a, const Eight& b) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(a.x[i], b.x[i], sum);
  return sum;
}

// As memory of type T will hold it.
template <typename T>
__device__ __forceinline__ void round(Eight& a) {
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const float2 pair = ptx::unpack<T>(ptx::pack<T>(a.x[i], a.x[i + 1]));
      a.x[i] = pair.x;
      a.x[i + 1] = pair.y;
    }
  }
}

}  // namespace fovea::layers::cuda
