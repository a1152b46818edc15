// A warp has a head. It reads it from memory once; what it needs again is still in the L1 cache.
// Heads are a step or two of its loops, which gain nothing by being unrolled.
#include <algorithm>

#include "backend/cuda/common/launch.cuh"
#include "base/ceil_div.h"
#include "layers/cuda/by_dtype.h"
#include "layers/cuda/head_rows.cuh"
#include "layers/cuda/norm.h"
#include "prim/cuda/ptx/grid_dependency.cuh"

namespace fovea::layers::cuda {
namespace {

constexpr int kWarps = 4;  // of a block, at most

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// What a head is shifted and scaled by: xhat = (x - mean) * inverse.
struct NormStats {
  float mean, inverse;
};

template <typename T, int kWidth>
__device__ __forceinline__ NormStats stats_of(const NormArguments& a, const T* x, int lane) {
  const auto count = static_cast<float>(a.x.dim);
  float mean = 0, squares = 0, e[kWidth];
  if (a.kind == QkNorm::kLayer) {
#pragma unroll 1
    for (int64_t i = lane * kWidth; i < a.x.dim; i += 32 * kWidth) {
      load_floats(x + i, e);
#pragma unroll
      for (int n = 0; n < kWidth; ++n) mean += e[n];
    }
    mean = sum_of_warp(mean) / count;
  }
#pragma unroll 1
  for (int64_t i = lane * kWidth; i < a.x.dim; i += 32 * kWidth) {
    load_floats(x + i, e);
#pragma unroll
    for (int n = 0; n < kWidth; ++n) squares += (e[n] - mean) * (e[n] - mean);
  }
  return {mean, 1 / sqrtf(sum_of_warp(squares) / count + a.eps)};
}

template <typename T, int kWidth>
__device__ __forceinline__ void load_or(const void* from, int64_t i, float absent,
                                        float (&to)[kWidth]) {
  if (from != nullptr) return load_floats(static_cast<const T*>(from) + i, to);
#pragma unroll
  for (int n = 0; n < kWidth; ++n) to[n] = absent;
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(32 * kWarps)
    norm_kernel(const __grid_constant__ NormArguments a) {
  ptx::wait_for_earlier_kernels();
  const int lane = threadIdx.x % 32;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (item >= a.x.batch * a.x.rows * a.x.heads) return;
  const int64_t row = item / a.x.heads, head = item % a.x.heads;
  const T* const x = head_at<T>(a.x, row, head);
  T* const y = head_at<T>(a.y, row, head);
  const NormStats stats = stats_of<T, kWidth>(a, x, lane);
#pragma unroll 1
  for (int64_t i = lane * kWidth; i < a.x.dim; i += 32 * kWidth) {
    float e[kWidth], weight[kWidth], bias[kWidth];
    load_floats(x + i, e);
    load_or<T>(a.weight, i, 1, weight);
    load_or<T>(a.bias, i, 0, bias);
#pragma unroll
    for (int n = 0; n < kWidth; ++n) {
      e[n] = (e[n] - stats.mean) * stats.inverse * weight[n] + bias[n];
    }
    store_floats(e, y + i);
  }
}

// dx = inverse * (g - mean(g) - xhat * mean(g xhat)) with g = dy * weight; RMS has no mean(g).
// s_sums [2, dim] are the warp's own, each lane's channels its own.
template <typename T, int kWidth>
__device__ __forceinline__ void head_backward(const NormBackwardArguments& a, int64_t item,
                                              int lane, float* s_sums) {
  const NormArguments& of = a.of;
  const int64_t dim = of.x.dim, row = item / of.x.heads, head = item % of.x.heads;
  const T* const x = head_at<T>(of.x, row, head);
  const T* const dy = head_at<T>(a.dy, row, head);
  T* const dx = head_at<T>(a.dx, row, head);
  const NormStats stats = stats_of<T, kWidth>(of, x, lane);
  float mean = 0, along = 0;
  float e[kWidth], given[kWidth], weight[kWidth];
#pragma unroll 1
  for (int64_t i = lane * kWidth; i < dim; i += 32 * kWidth) {
    load_floats(x + i, e);
    load_floats(dy + i, given);
    load_or<T>(of.weight, i, 1, weight);
#pragma unroll
    for (int n = 0; n < kWidth; ++n) {
      const float g = given[n] * weight[n], xhat = (e[n] - stats.mean) * stats.inverse;
      mean += g;
      along += g * xhat;
    }
  }
  const auto count = static_cast<float>(dim);
  mean = of.kind == QkNorm::kLayer ? sum_of_warp(mean) / count : 0;
  along = sum_of_warp(along) / count;
#pragma unroll 1
  for (int64_t i = lane * kWidth; i < dim; i += 32 * kWidth) {
    load_floats(x + i, e);
    load_floats(dy + i, given);
    load_or<T>(of.weight, i, 1, weight);
#pragma unroll
    for (int n = 0; n < kWidth; ++n) {
      const float xhat = (e[n] - stats.mean) * stats.inverse;
      if (a.sums != nullptr) {
        s_sums[i + n] += given[n] * xhat;
        s_sums[dim + i + n] += given[n];
      }
      e[n] = stats.inverse * (given[n] * weight[n] - mean - xhat * along);
    }
    store_floats(e, dx + i);
  }
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(32 * kWarps)
    norm_backward_kernel(const __grid_constant__ NormBackwardArguments a) {
  ptx::wait_for_earlier_kernels();
  extern __shared__ float s_all[];  // [warps, 2, dim]
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32;
  const int64_t count = 2 * a.of.x.dim;
  if (a.sums != nullptr) {
    for (int64_t i = threadIdx.x; i < warps * count; i += blockDim.x) s_all[i] = 0;
    __syncthreads();
  }
  const int64_t items = a.of.x.batch * a.of.x.rows * a.of.x.heads;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * warps + warp; item < items;
       item += static_cast<int64_t>(gridDim.x) * warps) {
    head_backward<T, kWidth>(a, item, threadIdx.x % 32, s_all + warp * count);
  }
  if (a.sums == nullptr) return;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    float sum = 0;
    for (int w = 0; w < warps; ++w) sum += s_all[w * count + i];
    a.sums[blockIdx.x * count + i] = sum;
  }
}

template <typename T, int kWidth>
cudaError_t launch_norm_as(const NormArguments& a, cudaStream_t stream) {
  const int64_t blocks = ceil_div(a.x.batch * a.x.rows * a.x.heads, kWarps);
  if (blocks == 0) return cudaSuccess;
  return fovea::cuda::launch<norm_kernel<T, kWidth>>(
      {dim3(static_cast<unsigned>(blocks)), 32 * kWarps, 0, stream}, a);
}

template <typename T, int kWidth>
cudaError_t launch_backward_as(const NormBackwardArguments& a, cudaStream_t stream) {
  const int64_t dim = a.of.x.dim;
  int64_t warps = kWarps;
  if (a.sums != nullptr) warps = std::clamp<int64_t>(kMostNormChannels / dim, 1, kWarps);
  const int64_t shared =
      a.sums != nullptr ? warps * 2 * dim * static_cast<int64_t>(sizeof(float)) : 0;
  return fovea::cuda::launch<norm_backward_kernel<T, kWidth>>(
      {dim3(static_cast<unsigned>(a.parts)), static_cast<int>(32 * warps), static_cast<int>(shared),
       stream},
      a);
}

}  // namespace

cudaError_t launch_norm(const NormArguments& a, DType dtype, cudaStream_t stream) {
  return by_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    return a.wide ? launch_norm_as<T, kWide<T>>(a, stream) : launch_norm_as<T, 1>(a, stream);
  });
}

cudaError_t launch_norm_backward(const NormBackwardArguments& a, DType dtype, cudaStream_t stream) {
  return by_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    return a.of.wide ? launch_backward_as<T, kWide<T>>(a, stream)
                     : launch_backward_as<T, 1>(a, stream);
  });
}

}  // namespace fovea::layers::cuda
