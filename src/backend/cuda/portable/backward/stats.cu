// Both read rows alone, whatever the head dim: kernels of the dtype, not of an instance.
#include "backend/cuda/common/launch.cuh"
#include "backend/cuda/portable/backward/element.cuh"
#include "backend/cuda/portable/backward/stats.h"
#include "backend/cuda/portable/loads.cuh"
#include "base/ceil_div.h"
#include "prim/cuda/ptx/grid_dependency.cuh"

namespace fovea::cuda {
namespace {

constexpr int kStatThreads = 128;

// Lanes that share a row, as a power of two: each reads 8 values at a time.
int stat_lane_bits(int dim_v) {
  int bits = 0;
  while (bits < 5 && 8 << bits < dim_v) ++bits;
  return bits;
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

// 2^lane_bits lanes a row of [batch][head_q][q_len]. Zeroes the sums of gradients besides.
template <typename T>
__global__ void __launch_bounds__(kStatThreads)
    row_stats_kernel(const __grid_constant__ BackwardArguments a, int lane_bits) {
  ptx::wait_for_earlier_kernels();
  if (a.keys_begin_early) ptx::let_next_kernel_begin();
  const Problem& p = a.p;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kStatThreads + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kStatThreads;
  const int lanes = 1 << lane_bits, lane = threadIdx.x & (lanes - 1);
  const int64_t index = thread >> lane_bits;
  const int64_t bh = index < kDividable ? a.of_q_len(index) : index / p.q_len;
  const int b = bh < kDividable ? a.of_head_q(bh) : static_cast<int>(bh / p.head_q);
  const int head = static_cast<int>(bh - int64_t{b} * p.head_q);
  const int i = static_cast<int>(index - bh * p.q_len);
  const Sequence s = b < a.batch ? sequence_at(p, b) : Sequence{};
  const bool real = i < s.q_len;
  DotShare dot;
  float lse = 0, dlse = 0;
  if (real) {
    const auto scalar = [&](const RowScalars& t) {
      return t.data[s.batch_at * t.batch + head * t.head + (s.q_row + i) * t.row];
    };
    lse = scalar(a.lse);  // on its way with the rows
    if (a.dlse.data != nullptr) dlse = scalar(a.dlse);
    dot.add(rows_at<const T>(a.out, s, s.q_row + i, head),
            rows_at<const T>(a.dout, s, s.q_row + i, head), p.dim_v, lane, lanes,
            a.vector_out && a.vector_dout);
    if (lse == -kInfinity && a.marks_hidden_rows) {
      const T* const q = rows_at<const T>(a.q, s, s.q_row + i, head);
      DotShare of_q;
      of_q.add(q, q, p.dim_qk, lane, lanes, a.vector_q);
      dot.zero += of_q.zero;
    }
  }
  for (int64_t x = thread; x < a.sum_floats / 4; x += threads) {
    reinterpret_cast<float4*>(a.dq_sum)[x] = {0, 0, 0, 0};
  }
  for (int step = lanes / 2; step > 0; step /= 2) {
    dot.sum += __shfl_xor_sync(0xffffffffu, dot.sum, step);
    dot.zero += __shfl_xor_sync(0xffffffffu, dot.zero, step);
  }
  if (!real || lane != 0) return;
  const int64_t at = stat_index(a, s, head, i);
  a.lse2[at] = lse == -kInfinity ? kInfinity : lse * kLog2e;
  const float delta = dot.zero != 0 ? __uint_as_float(kBadDout) : dot.sum - dlse;
  const bool hidden = lse == -kInfinity && !(a.marks_hidden_rows && dot.zero != 0);
  a.delta[at] = hidden ? 0.0f : delta;
}

// One block a head, always in the same order.
__global__ void __launch_bounds__(kStatThreads)
    sink_gradient_kernel(const __grid_constant__ BackwardArguments a) {
  ptx::wait_for_earlier_kernels();
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

dim3 grid(int64_t blocks) { return dim3(static_cast<unsigned>(blocks)); }

}  // namespace

template <typename T>
cudaError_t row_stats(const BackwardArguments& a, cudaStream_t stream) {
  const int64_t rows = static_cast<int64_t>(a.batch) * a.p.head_q * a.p.q_len;
  const int lane_bits = stat_lane_bits(a.p.dim_v);
  const int64_t blocks = ceil_div(rows << lane_bits, kStatThreads);
  if (blocks == 0) return cudaSuccess;
  return launch<row_stats_kernel<T>>({grid(blocks), kStatThreads, 0, stream}, a, lane_bits);
}

template cudaError_t row_stats<float>(const BackwardArguments&, cudaStream_t);
template cudaError_t row_stats<ptx::TensorFloat>(const BackwardArguments&, cudaStream_t);
template cudaError_t row_stats<__half>(const BackwardArguments&, cudaStream_t);
template cudaError_t row_stats<__nv_bfloat16>(const BackwardArguments&, cudaStream_t);

cudaError_t sink_gradient(const BackwardArguments& a, cudaStream_t stream) {
  return launch<sink_gradient_kernel>({grid(a.p.head_q), kStatThreads, 0, stream}, a);
}

}  // namespace fovea::cuda
