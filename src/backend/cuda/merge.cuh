// Joins partial results over disjoint keys: a warp has a row, each of its lanes one part's weight.
#pragma once

#include <cstdint>
#include <cstring>

#include "prim/cuda/ptx/grid_dependency.cuh"
#include "prim/cuda/ptx/math.cuh"

namespace fovea::cuda {

constexpr int kMergeParts = 32;  // of one launch: a warp's lanes
constexpr int kMergeRows = 4;    // of a block: its warps

// A row, or a scalar, per (batch, row, head); strides in elements.
struct MergeTensor {
  void* data;
  int64_t batch, row, head;
};

struct MergeResult {
  MergeTensor out;  // [batch, row, head, dim], dim contiguous
  MergeTensor lse;  // [batch, head, row]
};

struct MergeArguments {
  int64_t batch, rows, heads, dim;
  int parts;
  MergeResult result;  // may be one of the parts
  MergeResult part[kMergeParts];
};

// Sums and weights of f64 results are f64, of all others f32; lse has the same type.
template <typename T>
struct MergeNumber {
  using Real = float;
};
template <>
struct MergeNumber<double> {
  using Real = double;
};

template <typename T>
__device__ __forceinline__ typename MergeNumber<T>::Real merge_load(T x) {
  if constexpr (sizeof(T) == 8) {
    return x;
  } else {
    return ptx::to_float(x);
  }
}

template <typename T>
__device__ __forceinline__ T merge_rounded(typename MergeNumber<T>::Real x) {
  if constexpr (sizeof(T) == 8) {
    return x;
  } else {
    return ptx::from_float<T>(x);
  }
}

// A word of so many bytes, to be stored by an intrinsic: the compiler would take it apart.
template <int kBytes>
struct MergeWord;
template <>
struct MergeWord<2> {
  using Type = uint16_t;
};
template <>
struct MergeWord<4> {
  using Type = uint32_t;
};
template <>
struct MergeWord<8> {
  using Type = uint2;
};
template <>
struct MergeWord<16> {
  using Type = uint4;
};

// Neighbouring elements, read and written at once.
template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) MergePack {
  using Word = typename MergeWord<sizeof(T) * kWidth>::Type;
  T x[kWidth];

  __device__ __forceinline__ void store(T* to) const {
    Word word;
    memcpy(&word, x, sizeof(word));
    __stwb(reinterpret_cast<Word*>(to), word);
  }
};

struct MergeRow {
  int64_t batch, row, head;

  template <typename T>
  __device__ __forceinline__ T* in(const MergeTensor& t) const {
    return static_cast<T*>(t.data) + batch * t.batch + row * t.row + head * t.head;
  }
};

// The result may be a part's own memory: a lane reads its elements of every part before it writes
// them, and the row's lse is written after the vote that every lane brought its lse to.
template <typename T, int kWidth>
__device__ __forceinline__ void merge_row(const MergeArguments& a, const MergeRow& at, int lane) {
  using Real = typename MergeNumber<T>::Real;
  using Pack = MergePack<T, kWidth>;
  constexpr unsigned kWarp = 0xffffffffu;
  constexpr Real kNothing = -__builtin_huge_valf();  // the lse of a part that saw no key
  const Real lse = lane < a.parts ? *at.in<Real>(a.part[lane].lse) : kNothing;
  Real largest = fmax(lse, kNothing);  // a NaN counts in the sum, not here
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    largest = fmax(largest, __shfl_xor_sync(kWarp, largest, step));
  }
  const Real weight = lse == kNothing ? Real{0} : exp(lse - largest);
  Real sum = weight;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kWarp, sum, step);
  const Real share = weight / sum;
  const unsigned seeing = __ballot_sync(kWarp, lse != kNothing);

  for (int64_t begin = 0; begin < a.dim; begin += 32 * kWidth) {
    const int64_t d = begin + lane * kWidth;
    Real total[kWidth] = {};
    for (unsigned left = seeing; left != 0; left &= left - 1) {
      const int n = __ffs(static_cast<int>(left)) - 1;
      const Real share_of_part = __shfl_sync(kWarp, share, n);
      if (d >= a.dim) continue;
      const Pack from = *reinterpret_cast<const Pack*>(at.in<T>(a.part[n].out) + d);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) total[i] += share_of_part * merge_load(from.x[i]);
    }
    if (d >= a.dim) continue;
    Pack to;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) to.x[i] = merge_rounded<T>(total[i]);
    to.store(at.in<T>(a.result.out) + d);
  }
  // No part saw a key: largest and log(0) are both -inf, and so is their sum.
  if (lane == 0) *at.in<Real>(a.result.lse) = largest + log(sum);
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(32 * kMergeRows)
    merge_kernel(const __grid_constant__ MergeArguments a) {
  ptx::wait_for_earlier_kernels();
  const int64_t step = static_cast<int64_t>(gridDim.x) * kMergeRows;
  int64_t index = static_cast<int64_t>(blockIdx.x) * kMergeRows + threadIdx.x / 32;
  for (; index < a.batch * a.rows * a.heads; index += step) {
    const int64_t row = index / a.heads;
    merge_row<T, kWidth>(a, {row / a.rows, row % a.rows, index % a.heads}, threadIdx.x % 32);
  }
}

}  // namespace fovea::cuda
