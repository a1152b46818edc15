// From the raw product q . k to the logit: scale, softcap, bias, ALiBi, boolean mask; and which
// weights dropout keeps. One element at a time; what a problem lacks costs a uniform branch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backend/cuda/common/softcap.cuh"
#include "backend/cuda/portable/geometry.cuh"
#include "prim/cuda/ptx/math.cuh"

namespace fovea::cuda {

constexpr float kInfinity = __builtin_huge_valf();

// What the terms of one query row need.
struct TermRow {
  const void* bias;     // at key 0
  const uint8_t* mask;  // at key 0
  float slope;          // ALiBi
  int position;
};

template <typename T>
__device__ __forceinline__ TermRow term_row(const Problem& p, const Sequence& s, int b, int head_q,
                                            int i) {
  TermRow row{};
  row.position = i + s.kv_len - s.q_len;
  if (p.bias.data != nullptr) {
    const int64_t at = b * p.bias.batch + head_q * p.bias.head + i * p.bias.q;
    row.bias = p.bias_is_f32 ? static_cast<const void*>(static_cast<const float*>(p.bias.data) + at)
                             : static_cast<const void*>(static_cast<const T*>(p.bias.data) + at);
  }
  if (p.bool_mask.data != nullptr) {
    row.mask = static_cast<const uint8_t*>(p.bool_mask.data) + b * p.bool_mask.batch +
               head_q * p.bool_mask.head + i * p.bool_mask.q;
  }
  if (p.alibi != nullptr) row.slope = p.alibi[b * p.alibi_batch + head_q * p.alibi_head];
  return row;
}

template <typename T>
__device__ __forceinline__ float bias_at(const Problem& p, const TermRow& row, int key) {
  return p.bias_is_f32 ? static_cast<const float*>(row.bias)[key]
                       : ptx::to_float(static_cast<const T*>(row.bias)[key]);
}
// Of keys key and key + 1, key even, where the problem's bias takes pairs.
template <typename T>
__device__ __forceinline__ float2 bias_pair(const Problem& p, const TermRow& row, int key) {
  if (p.bias_is_f32 || sizeof(T) == 4) {
    return *reinterpret_cast<const float2*>(static_cast<const float*>(row.bias) + key);
  }
  const auto two = *reinterpret_cast<const uint32_t*>(static_cast<const T*>(row.bias) + key);
  return ptx::unpack<T>(two);
}

// tanh to a few units in the last place: by exp, and by its odd series near zero.
__device__ __forceinline__ float tanh_exact(float x) {
  const float a = fabsf(x);
  if (a < 0.25f) {
    const float z = x * x;
    float near = 2.186948854e-2f;
    near = fmaf(near, z, -5.396825397e-2f);
    near = fmaf(near, z, 1.333333333e-1f);
    near = fmaf(near, z, -3.333333333e-1f);
    return fmaf(near, z, 1.0f) * x;
  }
  const float e = ptx::exp2_approx(a * -2.885390082f);
  return copysignf(__fdividef(1.0f - e, 1.0f + e), x);
}

// As softcap needs it: an error of 1e-7 is far below what 16-bit inputs let a logit be known to.
template <typename T>
__device__ __forceinline__ float tanh_for(float x) {
  if constexpr (sizeof(T) == 4) return tanh_exact(x);
  return tanh_by_exp(x);
}

// The logit in natural-log units, -inf where the boolean mask hides it. Keys past the sequence are
// not to be asked for. `slope` gets d logit / d (scale * raw).
template <typename T>
__device__ __forceinline__ float logit(const Problem& p, const TermRow& row, int key, float raw,
                                       float* slope) {
  float x = raw * p.scale;
  if (p.softcap > 0) {
    const float t = tanh_for<T>(x * (1.0f / p.softcap));
    x = t * p.softcap;
    if (slope != nullptr) *slope = 1.0f - t * t;
  }
  if (row.bias != nullptr) {
    x += bias_at<T>(p, row, key);
  }
  if (p.alibi != nullptr) x -= row.slope * fabsf(static_cast<float>(row.position - key));
  if (row.mask != nullptr && row.mask[key] == 0) x = -kInfinity;
  return x;
}

// Words of the dropout generator for keys 4 * block .. 4 * block + 3 (Philox 4x32-10).
__device__ __forceinline__ uint4 drop_words(const Problem& p, int batch_head, int i, int block) {
  uint32_t c0 = block, c1 = i, c2 = batch_head, c3 = p.drop_offset;
  uint32_t k0 = p.drop_key0, k1 = p.drop_key1;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const uint32_t high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {c0, c1, c2, c3};
}

// 1 / (1 - p) or 0 for the neighbouring keys key and key + 1, key even.
__device__ __forceinline__ float2 keep_two(const Problem& p, int batch_head, int i, int key) {
  const uint4 w = drop_words(p, batch_head, i, key / 4);
  const uint32_t first = key % 4 == 0 ? w.x : w.z, second = key % 4 == 0 ? w.y : w.w;
  return {first >= p.drop_threshold ? p.keep_scale : 0.0f,
          second >= p.drop_threshold ? p.keep_scale : 0.0f};
}

}  // namespace fovea::cuda
