// What backward needs of every query row before it starts: delta and lse in log2 units. And the
// gradient of the sink, which needs nothing else.
#pragma once

#include "backend/cuda/portable/backward/element.cuh"
#include "backend/cuda/portable/loads.cuh"

namespace fovea::cuda {

constexpr int kStatThreads = 128;

// Lanes that share a row: each reads 8 values at a time.
__host__ __device__ constexpr int stat_lanes(int dim_v) {
  int lanes = 1;
  while (lanes < 32 && lanes * 8 < dim_v) lanes *= 2;
  return lanes;
}

// out . dout over this lane's share of a row, in one order whether or not vectors may be read; and
// whether dout is finite there.
struct DotShare {
  float sum = 0, zero = 0;

  template <typename T>
  __device__ __forceinline__ void add(const T* out, const T* dout, int dim, int lane, int lanes,
                                      bool vector) {
    constexpr int kPer = 16 / sizeof(T);
    for (int d = lane * kPer; d < dim; d += lanes * kPer) {
      T x[kPer], y[kPer];
      if (vector) {
        *reinterpret_cast<uint4*>(x) = *reinterpret_cast<const uint4*>(out + d);
        *reinterpret_cast<uint4*>(y) = *reinterpret_cast<const uint4*>(dout + d);
      } else {
        for (int i = 0; i < kPer; ++i) {
          x[i] = d + i < dim ? out[d + i] : ptx::from_float<T>(0);
          y[i] = d + i < dim ? dout[d + i] : ptx::from_float<T>(0);
        }
      }
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        sum = fmaf(ptx::to_float(x[i]), ptx::to_float(y[i]), sum);
        zero = fmaf(ptx::to_float(y[i]), 0.0f, zero);
      }
    }
  }
};

// stat_lanes lanes a row of [batch][head_q][q_len]. Zeroes the sums of gradients besides.
template <typename T>
__global__ void __launch_bounds__(kStatThreads)
    row_stats_kernel(const __grid_constant__ BackwardArguments a) {
  const Problem& p = a.p;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kStatThreads + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kStatThreads;
  for (int64_t x = thread; x < a.sum_floats / 4; x += threads) {
    reinterpret_cast<float4*>(a.dq_sum)[x] = {0, 0, 0, 0};
  }
  const int lanes = stat_lanes(p.dim_v), lane = threadIdx.x % lanes;
  const int64_t index = thread / lanes;
  const int64_t bh = index / p.q_len;
  const int b = static_cast<int>(bh / p.head_q), head = static_cast<int>(bh % p.head_q);
  const int i = static_cast<int>(index % p.q_len);
  const Sequence s = b < a.batch ? sequence_at(p, b) : Sequence{};
  const bool real = i < s.q_len;
  DotShare dot;
  if (real) {
    dot.add(rows_at<const T>(a.out, s, s.q_row + i, head),
            rows_at<const T>(a.dout, s, s.q_row + i, head), p.dim_v, lane, lanes,
            a.vector_out && a.vector_dout);
  }
  for (int step = lanes / 2; step > 0; step /= 2) {
    dot.sum += __shfl_xor_sync(0xffffffffu, dot.sum, step);
    dot.zero += __shfl_xor_sync(0xffffffffu, dot.zero, step);
  }
  if (!real || lane != 0) return;
  float sum = dot.sum;
  const auto scalar = [&](const RowScalars& t) {
    return t.data[s.batch_at * t.batch + head * t.head + (s.q_row + i) * t.row];
  };
  if (a.dlse.data != nullptr) sum -= scalar(a.dlse);
  const float lse = scalar(a.lse);
  const int64_t at = stat_index(a, s, head, i);
  a.lse2[at] = lse == -kInfinity ? kInfinity : lse * kLog2e;
  if (dot.zero != 0) sum = __uint_as_float(kBadDout);
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
