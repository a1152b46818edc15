// Words of set bits, 2^x, pairs of floats as pairs of 16-bit values, and floats as tf32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace fovea::ptx {

// A word whose lowest n bits are set: none where n is negative, all from 32 on.
__device__ __forceinline__ uint32_t bits_below(int n) {
  uint32_t bits;
  asm("bmsk.clamp.b32 %0, 0, %1;" : "=r"(bits) : "r"(n < 0 ? 0 : n));
  return bits;
}

// A pair of 16 bits that are all set or none, as bit 7 is and as bit 15 is.
__device__ __forceinline__ uint32_t pair_mask(uint32_t bits) {
  uint32_t mask;
  asm("prmt.b32 %0, %1, 0, 0x9988;" : "=r"(mask) : "r"(bits));
  return mask;
}

// A float in memory that tensor cores multiply as tf32: the range of a float, 11 bits of precision.
struct TensorFloat {
  float value;
};

// The nearest tf32, ties away from zero; what is not finite stays so.
__device__ __forceinline__ uint32_t round_to_tf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float4 round_to_tf32(float4 x) {
  return {__uint_as_float(round_to_tf32(x.x)), __uint_as_float(round_to_tf32(x.y)),
          __uint_as_float(round_to_tf32(x.z)), __uint_as_float(round_to_tf32(x.w))};
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The same to 7.5e-5 of it by multiply-adds, for where special functions are what is waited for: a
// power of two times a cubic. From 2^-126 to 2^127, which NaN gives too, or more.
__device__ __forceinline__ float exp2_cubic(float x) {
  constexpr float kRounding = 0x1.8p23f;  // leaves no bits behind the point
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(-126.0f));
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(127.0f));
  const float whole = x + kRounding, rest = x - (whole - kRounding);
  const float power = fmaf(fmaf(fmaf(0.0551716691f, rest, 0.2426111222f), rest, 0.6932609855f),
                           rest, 0.9999280735f);
  return __uint_as_float(__float_as_uint(power) + (__float_as_uint(whole) << 23));
}

// The first value in the low half.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

// A pair back, the low half first.
template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  if constexpr (sizeof(T) == 4) {
    return {};  // floats are not packed
  } else if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  } else {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  }
}

// The products of two pairs.
template <typename T>
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  uint32_t y;
  if constexpr (std::is_same_v<T, __half>) {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  } else {
    constexpr uint32_t kMinusZeros = 0x80008000u;  // Ampere has no multiplication alone
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(kMinusZeros));
  }
  return y;
}

// The larger values of two pairs; NaN stays NaN.
template <typename T>
__device__ __forceinline__ uint32_t max_of_pairs(uint32_t a, uint32_t b) {
  uint32_t y;
  if constexpr (std::is_same_v<T, __half>) {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  }
  return y;
}

__device__ __forceinline__ float to_float(__nv_bfloat16 x) {
  return __uint_as_float(uint32_t{__bfloat16_as_ushort(x)} << 16);
}
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(TensorFloat x) { return x.value; }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16(x);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half(x);
}
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ TensorFloat from_float<TensorFloat>(float x) {
  return {x};
}

}  // namespace fovea::ptx
