// Words of rows moved, or set to zero.
#include <algorithm>

#include "backend/cuda/common/launch.cuh"
#include "base/ceil_div.h"
#include "layers/cuda/copy.h"
#include "layers/cuda/head_rows.cuh"
#include "prim/cuda/ptx/grid_dependency.cuh"

namespace fovea::layers::cuda {
namespace {

constexpr int kCopyThreads = 256;

int64_t words_of(const HeadRows& t) { return t.batch * t.rows * t.heads * t.dim; }

template <typename Word>
__global__ void __launch_bounds__(kCopyThreads)
    copy_kernel(const __grid_constant__ CopyArguments a) {
  ptx::wait_for_earlier_kernels();
  const HeadRows& from = a.copies[blockIdx.y].from;
  const HeadRows& to = a.copies[blockIdx.y].to;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kCopyThreads + threadIdx.x;
  if (item >= to.batch * to.rows * to.heads * to.dim) return;
  const int64_t at = item % to.dim, head = item / to.dim % to.heads, row = item / to.dim / to.heads;
  head_at<Word>(to, row, head)[at] =
      from.data != nullptr ? head_at<const Word>(from, row, head)[at] : Word{};
}

template <typename Word>
cudaError_t launch_copy_as(const CopyArguments& a, cudaStream_t stream) {
  int64_t words = 0;
  for (int n = 0; n < a.count; ++n) words = std::max(words, words_of(a.copies[n].to));
  if (words == 0) return cudaSuccess;
  return fovea::cuda::launch<copy_kernel<Word>>(
      {dim3(static_cast<unsigned>(ceil_div(words, kCopyThreads)), static_cast<unsigned>(a.count)),
       kCopyThreads, 0, stream},
      a);
}

__global__ void __launch_bounds__(kCopyThreads)
    fill_lengths_kernel(int32_t* to, int64_t count, int32_t length) {
  ptx::wait_for_earlier_kernels();
  for (int64_t i = threadIdx.x; i < count; i += kCopyThreads) to[i] = length;
}

// 2^(-8 (h + 1) / n) for n heads, a power of two; other counts take every second slope of the next
// power for the heads that are left.
__global__ void __launch_bounds__(kCopyThreads) fill_alibi_slopes_kernel(float* to, int64_t heads) {
  ptx::wait_for_earlier_kernels();
  int64_t power = 1;
  while (power * 2 <= heads) power *= 2;
  for (int64_t h = threadIdx.x; h < heads; h += kCopyThreads) {
    const double exponent =
        h < power ? -8.0 * static_cast<double>(h + 1) / static_cast<double>(power)
                  : -4.0 * static_cast<double>(2 * (h - power) + 1) / static_cast<double>(power);
    to[h] = static_cast<float>(exp2(exponent));
  }
}

}  // namespace

cudaError_t launch_copy(const CopyArguments& a, cudaStream_t stream) {
  switch (a.word_bytes) {
    case 16: return launch_copy_as<uint4>(a, stream);
    case 8: return launch_copy_as<uint2>(a, stream);
    case 4: return launch_copy_as<uint32_t>(a, stream);
    default: return launch_copy_as<uint16_t>(a, stream);
  }
}

cudaError_t launch_fill_lengths(int32_t* to, int64_t count, int32_t length, cudaStream_t stream) {
  return fovea::cuda::launch<fill_lengths_kernel>({dim3(1), kCopyThreads, 0, stream}, to, count,
                                                  length);
}

cudaError_t launch_fill_alibi_slopes(float* to, int64_t heads, cudaStream_t stream) {
  return fovea::cuda::launch<fill_alibi_slopes_kernel>({dim3(1), kCopyThreads, 0, stream}, to,
                                                       heads);
}

}  // namespace fovea::layers::cuda
