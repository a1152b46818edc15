// A thread turns the same pairs of a few heads: their angles are computed once.
#include <algorithm>

#include "backend/cuda/common/launch.cuh"
#include "base/ceil_div.h"
#include "layers/cuda/by_dtype.h"
#include "layers/cuda/fixed_angles.cuh"
#include "layers/cuda/head_rows.cuh"
#include "layers/cuda/rotate.h"
#include "prim/cuda/ptx/grid_dependency.cuh"

namespace fovea::layers::cuda {
namespace {

constexpr int kRotateThreads = 256;
constexpr int kHeadsAtOnce = 4;  // loads in flight before the first store

__device__ __forceinline__ int64_t position_of(const RotateRows& r, int64_t row) {
  if (r.ids == nullptr) return r.first + row % r.x.rows;
  return r.ids[row / r.x.rows * r.ids_batch + row % r.x.rows * r.ids_row];
}

// kPairs neighbouring pairs of a head as two runs of kPairs elements, `second` after the first.
// By halves a pair is one of each run; interleaved, neighbours.
template <typename T, int kPairs, RopeStyle kStyle>
__global__ void __launch_bounds__(kRotateThreads)
    rotate_kernel(const __grid_constant__ RotateArguments a) {
  ptx::wait_for_earlier_kernels();
  __shared__ uint64_t s_step[FixedAngles::kMostPairs];
  const int pairs = a.angles.turning / 2;
  for (int i = threadIdx.x; i < pairs; i += kRotateThreads) s_step[i] = a.angles.step[i];
  __syncthreads();
  constexpr bool kHalf = kStyle == RopeStyle::kHalf;
  const RotateRows& r = a.rows[blockIdx.y];
  const int64_t runs = pairs / kPairs, groups = (r.x.heads + kHeadsAtOnce - 1) / kHeadsAtOnce;
  const int64_t items = r.x.batch * r.x.rows * groups * runs;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kRotateThreads + threadIdx.x;
  if (item >= items) return;
  const int pair = static_cast<int>(item % runs) * kPairs;
  const int64_t row = item / runs / groups, group = item / runs % groups;
  const int64_t position = position_of(r, row);
  Angle angles[kPairs];
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    angles[j] = angle_at(s_step[pair + j], position);
    angles[j].sine *= a.sign;
  }
  const int64_t first = kHalf ? pair : 2 * pair, second = first + (kHalf ? pairs : kPairs);
  float low[kHeadsAtOnce][kPairs], high[kHeadsAtOnce][kPairs];
#pragma unroll
  for (int n = 0; n < kHeadsAtOnce; ++n) {
    const int64_t h = group * kHeadsAtOnce + n;
    if (h >= r.x.heads) continue;
    const T* const x = head_at<T>(r.x, row, h);
    load_floats(x + first, low[n]);
    load_floats(x + second, high[n]);
  }
#pragma unroll
  for (int n = 0; n < kHeadsAtOnce; ++n) {
    const int64_t h = group * kHeadsAtOnce + n;
    if (h >= r.x.heads) continue;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int even = 2 * j, odd = 2 * j + 1;  // interleaved: places in both runs together
      float& x = kHalf ? low[n][j] : even < kPairs ? low[n][even] : high[n][even - kPairs];
      float& y = kHalf ? high[n][j] : odd < kPairs ? low[n][odd] : high[n][odd - kPairs];
      const float turned = x * angles[j].cosine - y * angles[j].sine;
      y = x * angles[j].sine + y * angles[j].cosine;
      x = turned;
    }
    T* const to = head_at<T>(r.x, row, h);
    store_floats(low[n], to + first);
    store_floats(high[n], to + second);
  }
}

template <typename T, int kPairs>
cudaError_t launch_rotate_as(const RotateArguments& a, cudaStream_t stream) {
  int64_t items = 0;
  for (int n = 0; n < a.count; ++n) {
    const HeadRows& x = a.rows[n].x;
    const int64_t runs = a.angles.turning / 2 / kPairs;
    items = std::max(items, x.batch * x.rows * ceil_div(x.heads, int64_t{kHeadsAtOnce}) * runs);
  }
  if (items == 0) return cudaSuccess;
  const fovea::cuda::Launch how{
      dim3(static_cast<unsigned>(ceil_div(items, int64_t{kRotateThreads})),
           static_cast<unsigned>(a.count)),
      kRotateThreads, 0, stream};
  return a.angles.style == RopeStyle::kHalf
             ? fovea::cuda::launch<rotate_kernel<T, kPairs, RopeStyle::kHalf>>(how, a)
             : fovea::cuda::launch<rotate_kernel<T, kPairs, RopeStyle::kInterleaved>>(how, a);
}

}  // namespace

cudaError_t launch_rotate(const RotateArguments& a, DType dtype, cudaStream_t stream) {
  return by_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    return a.wide ? launch_rotate_as<T, kWide<T>>(a, stream) : launch_rotate_as<T, 1>(a, stream);
  });
}

}  // namespace fovea::layers::cuda
