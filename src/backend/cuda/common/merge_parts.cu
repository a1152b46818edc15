// One warp a row.
#include "backend/cuda/common/launch.cuh"
#include "backend/cuda/common/merge_parts.h"
#include "backend/cuda/common/sequence.cuh"
#include "base/ceil_div.h"
#include "prim/cuda/ptx/grid_dependency.cuh"
#include "prim/cuda/ptx/math.cuh"

namespace fovea::cuda {
namespace {

constexpr int kMergePartsThreads = 128;

template <typename T>
__global__ void __launch_bounds__(kMergePartsThreads)
    merge_parts_kernel(const __grid_constant__ MergePartsArguments a) {
  ptx::wait_for_earlier_kernels();
  constexpr float kNone = -__builtin_huge_valf();  // the reference of a part that saw nothing
  const Problem& p = a.p;
  const int64_t all = static_cast<int64_t>(p.group) * p.q_len;
  const int64_t rows = static_cast<int64_t>(a.batch) * p.head_kv * all;
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * kMergePartsThreads + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (index >= rows) return;
  const int64_t kv = index / all;
  const int b = static_cast<int>(kv / p.head_kv), head_kv = static_cast<int>(kv % p.head_kv);
  const Sequence s = sequence_at(p, b);
  const int row = static_cast<int>(index % all);
  if (row >= p.group * s.q_len) return;
  const int head = head_kv * p.group + row / s.q_len;
  const int64_t i = s.q_row + row % s.q_len;

  float top = kNone;
  for (int part = 0; part < a.parts.count; ++part) {
    top = fmaxf(top, a.parts.stats[part * rows + index].x);
  }
  float sum = 0;
  for (int part = 0; part < a.parts.count; ++part) {
    const float2 stats = a.parts.stats[part * rows + index];
    if (stats.x != kNone) sum += ptx::exp2_approx(stats.x - top) * stats.y;
  }
  const float inverse = sum == 0 ? 0.0f : 1.0f / sum;
  T* const out =
      static_cast<T*>(a.out.data) + s.batch_at * a.out.batch + head * a.out.head + i * a.out.row;
  for (int d = lane; d < p.dim_v; d += 32) {
    float total = 0;
    for (int part = 0; part < a.parts.count; ++part) {
      const int64_t at = part * rows + index;
      const float reference = a.parts.stats[at].x;
      if (reference == kNone) continue;  // what it holds does not count, not even NaN
      total += ptx::exp2_approx(reference - top) * a.parts.sums[at * p.dim_v + d];
    }
    out[d] = ptx::from_float<T>(total * inverse);
  }
  if (a.lse.data != nullptr && lane == 0) {
    a.lse.data[s.batch_at * a.lse.batch + head * a.lse.head + i * a.lse.row] =
        sum == 0 ? kNone : (top + log2f(sum)) * kLn2;
  }
}

}  // namespace

template <typename T>
cudaError_t merge_parts(const MergePartsArguments& a, cudaStream_t stream) {
  const int64_t rows = static_cast<int64_t>(a.batch) * a.p.head_q * a.p.q_len;
  const auto blocks = static_cast<unsigned>(ceil_div(rows * 32, kMergePartsThreads));
  return launch<merge_parts_kernel<T>>({dim3(blocks), kMergePartsThreads, 0, stream}, a);
}

template cudaError_t merge_parts<float>(const MergePartsArguments&, cudaStream_t);
template cudaError_t merge_parts<ptx::TensorFloat>(const MergePartsArguments&, cudaStream_t);
template cudaError_t merge_parts<__half>(const MergePartsArguments&, cudaStream_t);
template cudaError_t merge_parts<__nv_bfloat16>(const MergePartsArguments&, cudaStream_t);

}  // namespace fovea::cuda
