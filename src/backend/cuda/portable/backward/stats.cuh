// What backward needs of every query row before it starts: delta and lse in log2 units. And the
// gradient of the sink, which needs nothing else.
#pragma once

#include "backend/cuda/portable/backward/element.cuh"

namespace fovea::cuda {

constexpr int kStatThreads = 128;

// One warp a row of [batch][head_q][q_len].
template <typename T>
__global__ void __launch_bounds__(kStatThreads)
    row_stats_kernel(const __grid_constant__ BackwardArguments a) {
  const Problem& p = a.p;
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * kStatThreads + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  const int64_t bh = index / p.q_len;
  const int b = static_cast<int>(bh / p.head_q), head = static_cast<int>(bh % p.head_q);
  const int i = static_cast<int>(index % p.q_len);
  if (b >= a.batch) return;
  const Sequence s = sequence_at(p, b);
  if (i >= s.q_len) return;
  const auto row = [&](const Rows& t) {
    return static_cast<const T*>(t.data) + s.batch_at * t.batch + head * t.head +
           (s.q_row + i) * t.row;
  };
  const T* const out = row(a.out);
  const T* const dout = row(a.dout);
  float sum = 0;
  for (int d = lane; d < p.dim_v; d += 32) {
    sum = fmaf(ptx::to_float(out[d]), ptx::to_float(dout[d]), sum);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (lane != 0) return;
  const auto scalar = [&](const RowScalars& t) {
    return t.data[s.batch_at * t.batch + head * t.head + (s.q_row + i) * t.row];
  };
  if (a.dlse.data != nullptr) sum -= scalar(a.dlse);
  const float lse = scalar(a.lse);
  const int64_t at = stat_index(a, s, head, i);
  a.lse2[at] = lse == -kInfinity ? kInfinity : lse * kLog2e;
  a.delta[at] = lse == -kInfinity ? 0.0f : sum;
}

// One block a head, always in the same order.
static __global__ void __launch_bounds__(kStatThreads)
    sink_gradient_kernel(const __grid_constant__ BackwardArguments a) {
  const Problem& p = a.p;
  const int head = blockIdx.x;
  const float sink2 = p.sink[head * p.sink_head] * kLog2e;
  double total = 0;
  for (int b = 0; b < a.batch; ++b) {
    const Sequence s = sequence_at(p, b);
    for (int i = threadIdx.x; i < s.q_len; i += kStatThreads) {
      const int64_t at = stat_index(a, s, head, i);
      if (a.lse2[at] == kInfinity) continue;  // the row sees nothing, the sink neither
      total -= static_cast<double>(exp2f(sink2 - a.lse2[at])) * a.delta[at];
    }
  }
  __shared__ double sums[kStatThreads];
  sums[threadIdx.x] = total;
  __syncthreads();
  for (int half = kStatThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) a.dsink[head * a.dsink_head] = static_cast<float>(sums[0]);
}

}  // namespace fovea::cuda
