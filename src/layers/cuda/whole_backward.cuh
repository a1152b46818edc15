// Backward of layers of few channels in one kernel, but for the gradients of weights: a block takes
// some tokens from the gradients that attention leaves to z's.
#pragma once

#include "layers/cuda/tokens_backward.cuh"
#include "layers/cuda/whole_forward.cuh"

namespace fovea::layers::cuda {

// Rows are du's, numbered through the batch with room between its members for what both
// convolutions reach; row r stands for token r - margin.
struct WholeBackward {
  int blocks = 0;  // 0: not this way
  int q_len = 0, all_rows = 0, reach = 0, margin = 0, u_rows = 0, width = 0;
  Divider span;
  After after;
  WholeConv first, second;
  WholeRoom room;
  Rows du, dz;
};

template <typename T>
__global__ void __launch_bounds__(kWholeThreads, 1)
    whole_backward_kernel(const __grid_constant__ WholeBackward a) {
  constexpr int kRows = kWholeRows, kM = kRows / 16;
  extern __shared__ __align__(128) std::byte shared[];
  const int begin = static_cast<int>(blockIdx.x) * kRows, pitch = a.room.pitch;
  T* const s_dmixed = reinterpret_cast<T*>(shared + a.room.wide);
  T* const s_du = reinterpret_cast<T*>(shared + a.room.near);
  float* const s_sums = reinterpret_cast<float*>(shared + a.room.sums);
  ptx::wait_for_earlier_kernels();
  load_weights<T>(a.second, shared);
  load_weights<T>(a.first, shared);
  ptx::cp_async_commit();

  const After& after = a.after;
  Coupling coupling = after.coupling;
  coupling.sums = reinterpret_cast<float*>(shared + a.room.shares);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, heads_kv = coupling.heads_kv;
  // Rows as tokens, those of no token among them.
  const auto row_of = [&](int r) {
    RowAt at(begin + r, a.span);
    at.r -= a.margin;
    return TokenAt{r, at, begin + r < a.all_rows && at.r >= 0 && at.r < a.q_len};
  };
  for (int r = warp; r < kRows + a.reach; r += kWholeWarps) {
    const TokenAt row = row_of(r);
    T* const s_row = s_dmixed + r * pitch;
    if (!row.is) {
      for (int i = lane * 8; i < a.width; i += 256) store_eight(s_row + i, Eight{});
      continue;
    }
    const bool own = r < kRows;
    const int64_t token = int64_t{row.at.b} * a.q_len + row.at.r;
    T* const dmixed = after.dmixed.at<T>(row.at.b, row.at.r);
    HeadSums sums = token_backward<T>(
        after, row.at, own && after.slopes != nullptr ? after.slopes + token * heads_kv : nullptr,
        [&](int channel, const Eight& x) {
          store_eight(s_row + channel, x);
          if (own) store_eight(dmixed + channel, x);
        });
    if (!own) continue;
    after.values.copy<T>(row.at, 1);
    if (coupling.kind == Coupled::kAllHeads) sums.store(coupling, after.lanes, r);
  }
  ptx::cp_async_wait<0>();
  __syncthreads();

  convolve_rows<T, true, kM + 1>(
      a.second, shared, s_dmixed, pitch,
      [&](int n, int m, const ptx::Fragment& sum) { store_fragment(s_du, pitch, n, m, sum); });
  if (after.temperature != nullptr) {
    for (int g = threadIdx.x; g < heads_kv; g += kWholeThreads) {
      float sum = 0;
      for (int r = 0; r < kRows; ++r) {
        const TokenAt row = row_of(r);
        if (row.is) sum += after.slopes[(int64_t{row.at.b} * a.q_len + row.at.r) * heads_kv + g];
      }
      after.temperature[int64_t{blockIdx.x} * heads_kv + g] = sum;
    }
  }
  __syncthreads();
  store_near_rows(a, a.du, s_du, begin);
  convolve_rows<T, true, kM>(
      a.first, shared, s_du, pitch,
      [&](int n, int m, const ptx::Fragment& sum) { store_fragment(s_sums, pitch, n, m, sum); });
  __syncthreads();
  for (int r = warp; r < kRows; r += kWholeWarps) {
    const TokenAt row = row_of(r);
    if (!row.is) continue;
    for (int i = lane * 8; i < a.width; i += 256) {
      const int head = i / coupling.dim;
      Eight x = load_eight(s_sums + r * pitch + i);
      add(x, coupling.share<T>(r, row.at, head, i - head * coupling.dim));
      store_eight(a.dz.at<T>(row.at.b, row.at.r) + i, x);
    }
  }
}

}  // namespace fovea::layers::cuda
