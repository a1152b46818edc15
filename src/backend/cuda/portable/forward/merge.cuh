// Joins the parts of a forward pass that was cut over the keys: one warp a row.
#pragma once

#include "backend/cuda/portable/terms.cuh"

namespace fovea::cuda {

constexpr int kMergeThreads = 128;

template <typename T>
__global__ void __launch_bounds__(kMergeThreads)
    merge_parts_kernel(const __grid_constant__ ForwardArguments a) {
  const Problem& p = a.p;
  const int64_t all = static_cast<int64_t>(p.group) * p.q_len;
  const int64_t heads = static_cast<int64_t>(a.batch) * p.head_kv;
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * kMergeThreads + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (index >= heads * all) return;
  const int64_t kv = index / all;
  const int b = static_cast<int>(kv / p.head_kv), head_kv = static_cast<int>(kv % p.head_kv);
  const Sequence s = sequence_at(p, b);
  const int row = static_cast<int>(index % all);
  if (row >= p.group * s.q_len) return;
  const Row which = Row::at(s, row);
  const int head = head_kv * p.group + which.head;

  float top = -kInfinity;
  for (int part = 0; part < a.parts; ++part) {
    top = fmaxf(top, a.partial_stats[part * heads * all + index].x);
  }
  float sum = 0;
  for (int part = 0; part < a.parts; ++part) {
    const float2 stats = a.partial_stats[part * heads * all + index];
    if (stats.x != -kInfinity) sum += ptx::exp2_approx(stats.x - top) * stats.y;
  }
  const float inverse = sum == 0 ? 0.0f : 1.0f / sum;
  T* const out = static_cast<T*>(a.out.data) + s.batch_at * a.out.batch + head * a.out.head +
                 (s.q_row + which.i) * a.out.row;
  for (int d = lane; d < p.dim_v; d += 32) {
    float total = 0;
    for (int part = 0; part < a.parts; ++part) {
      const int64_t at = part * heads * all + index;
      const float reference = a.partial_stats[at].x;
      if (reference == -kInfinity) continue;  // what it holds does not count, not even NaN
      total += ptx::exp2_approx(reference - top) * a.partial[at * p.dim_v + d];
    }
    out[d] = ptx::from_float<T>(total * inverse);
  }
  if (a.lse.data != nullptr && lane == 0) {
    a.lse.data[s.batch_at * a.lse.batch + head * a.lse.head + (s.q_row + which.i) * a.lse.row] =
        sum == 0 ? -kInfinity : (top + log2f(sum)) * kLn2;
  }
}

}  // namespace fovea::cuda
