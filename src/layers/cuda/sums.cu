// Sums over rows, over parts and over heads.
#include "backend/cuda/common/launch.cuh"
#include "base/ceil_div.h"
#include "layers/cuda/by_dtype.h"
#include "layers/cuda/head_rows.cuh"
#include "layers/cuda/sums.h"
#include "prim/cuda/ptx/grid_dependency.cuh"

namespace fovea::layers::cuda {
namespace {

constexpr int kThreadsOfSums = 256;
constexpr int kColumns = 32;  // of a block of sum_parts, whose other threads have other parts

struct ColumnArguments {
  HeadRows x;
  float* sums;
};

template <typename T>
__global__ void __launch_bounds__(kThreadsOfSums)
    column_sums_kernel(const __grid_constant__ ColumnArguments a) {
  ptx::wait_for_earlier_kernels();
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kThreadsOfSums + threadIdx.x;
  if (column >= a.x.dim) return;
  const int64_t rows = a.x.batch * a.x.rows;
  float sum = 0;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    sum += ptx::to_float(head_at<T>(a.x, row, 0)[column]);
  }
  a.sums[blockIdx.y * a.x.dim + column] = sum;
}

struct PartArguments {
  const float* sums;
  int parts;
  SumTo first, second;
};

template <typename T>
__global__ void __launch_bounds__(kThreadsOfSums)
    sum_parts_kernel(const __grid_constant__ PartArguments a) {
  ptx::wait_for_earlier_kernels();
  constexpr int kRows = kThreadsOfSums / kColumns;
  __shared__ float s_sums[kRows][kColumns];
  const int lane = threadIdx.x % kColumns, turn = threadIdx.x / kColumns;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + lane;
  const int64_t count = a.first.count + a.second.count;
  float sum = 0;
  if (column < count) {
    for (int part = turn; part < a.parts; part += kRows) sum += a.sums[part * count + column];
  }
  s_sums[turn][lane] = sum;
  __syncthreads();
  if (turn != 0 || column >= count) return;
  for (int n = 1; n < kRows; ++n) sum += s_sums[n][lane];
  const bool is_first = column < a.first.count;
  const SumTo& to = is_first ? a.first : a.second;
  if (to.data == nullptr) return;
  static_cast<T*>(to.data)[is_first ? column : column - a.first.count] = ptx::from_float<T>(sum);
}

struct HeadArguments {
  HeadRows x, y;
};

template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreadsOfSums)
    sum_heads_kernel(const __grid_constant__ HeadArguments a) {
  ptx::wait_for_earlier_kernels();
  const int64_t pieces = a.x.dim / kWidth;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kThreadsOfSums + threadIdx.x;
  if (item >= a.x.batch * a.x.rows * pieces) return;
  const int64_t row = item / pieces, at = item % pieces * kWidth;
  const T* const x = head_at<T>(a.x, row, 0) + at;
  float sums[kWidth] = {};
#pragma unroll 4
  for (int64_t h = 0; h < a.x.heads; ++h) {
    float e[kWidth];
    load_floats(x + h * a.x.head_stride, e);
#pragma unroll
    for (int n = 0; n < kWidth; ++n) sums[n] += e[n];
  }
  store_floats(sums, head_at<T>(a.y, row, 0) + at);
}

template <typename T, int kWidth>
cudaError_t launch_heads_as(const HeadArguments& a, cudaStream_t stream) {
  const int64_t items = a.x.batch * a.x.rows * (a.x.dim / kWidth);
  if (items == 0) return cudaSuccess;
  return fovea::cuda::launch<sum_heads_kernel<T, kWidth>>(
      {dim3(static_cast<unsigned>(ceil_div(items, kThreadsOfSums))), kThreadsOfSums, 0, stream}, a);
}

}  // namespace

cudaError_t launch_column_sums(const HeadRows& x, DType dtype, float* sums, int parts,
                               cudaStream_t stream) {
  return by_dtype(dtype, [&](auto element) {
    return fovea::cuda::launch<column_sums_kernel<decltype(element)>>(
        {dim3(static_cast<unsigned>(ceil_div(x.dim, kThreadsOfSums)), static_cast<unsigned>(parts)),
         kThreadsOfSums, 0, stream},
        ColumnArguments{x, sums});
  });
}

cudaError_t launch_sum_parts(const float* sums, int parts, SumTo first, SumTo second, DType dtype,
                             cudaStream_t stream) {
  const int64_t count = first.count + second.count;
  return by_dtype(dtype, [&](auto element) {
    return fovea::cuda::launch<sum_parts_kernel<decltype(element)>>(
        {dim3(static_cast<unsigned>(ceil_div(count, kColumns))), kThreadsOfSums, 0, stream},
        PartArguments{sums, parts, first, second});
  });
}

cudaError_t launch_sum_heads(const HeadRows& x, const HeadRows& y, bool wide, DType dtype,
                             cudaStream_t stream) {
  return by_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    return wide ? launch_heads_as<T, kWide<T>>({x, y}, stream)
                : launch_heads_as<T, 1>({x, y}, stream);
  });
}

}  // namespace fovea::layers::cuda
