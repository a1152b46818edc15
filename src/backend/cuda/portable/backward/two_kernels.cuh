// A backward pass of two kernels, one for dk and dv and one for dq. No block adds to what another
// does, so that two runs give the same bits, and their shared memory is small.
#pragma once

#include "backend/cuda/portable/backward/apart.h"
#include "backend/cuda/portable/backward/keys.cuh"
#include "backend/cuda/portable/backward/launch_blocks.cuh"
#include "backend/cuda/portable/backward/rows.cuh"
#include "base/ceil_div.h"

namespace fovea::cuda {

template <typename Shape, KeySums kSums>
cudaError_t launch_keys(const BackwardArguments& a, cudaStream_t stream) {
  constexpr BackwardConfig kC = Shape::kConfig;
  const int64_t tiles = ceil_div(a.p.kv_len, kC.key_tile());
  return launch_blocks<backward_keys_kernel<Shape, static_cast<int>(kSums)>>(
      int64_t{a.batch} * a.p.head_kv * tiles, kC.key_threads(), kC.key_shared_bytes(), stream, a);
}

template <typename Shape>
cudaError_t launch_two_kernels(const BackwardArguments& a, cudaStream_t stream) {
  constexpr BackwardConfig kC = Shape::kConfig;
  cudaError_t error = cudaSuccess;
  if constexpr (kC.split) {
    error = launch_keys<Shape, KeySums::kDk>(a, stream);
    if (error == cudaSuccess) error = launch_keys<Shape, KeySums::kDv>(a, stream);
  } else {
    error = launch_keys<Shape, KeySums::kBoth>(a, stream);
  }
  if (error != cudaSuccess) return error;
  const int64_t tiles = ceil_div(int64_t{a.p.group} * a.p.q_len, kC.row_tile());
  return launch_blocks<backward_rows_kernel<Shape>>(
      int64_t{a.batch} * a.p.head_kv * tiles, kC.row_threads(), kC.row_shared_bytes(), stream, a);
}

}  // namespace fovea::cuda
