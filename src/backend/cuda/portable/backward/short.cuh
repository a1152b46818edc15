// All three gradients in one launch and without a workspace, for sequences so short that launches
// and the start of blocks take longer than products. There are two kinds of blocks: some hold keys
// and walk over the query rows that see them, for dk and dv, the others hold query rows and walk
// over keys, for dq. The warps of a block take turns at what is walked over, 16 rows at a time, and
// add up what they have at the end. No block waits for another, and sums always have the same
// order.
#pragma once

#include "backend/cuda/portable/backward/short_keys.cuh"
#include "backend/cuda/portable/backward/short_rows.cuh"
#include "prim/cuda/ptx/grid_dependency.cuh"

namespace fovea::cuda {

template <typename Shape>
constexpr int short_shared_bytes() {
  using Keys = ShortKeys<Shape>;
  using Rows = ShortRows<Shape>;
  int most = 0;
  for (const int bytes : {Keys::kWarpBytes * Shape::kShort.warps, Keys::kSumBytes,
                          Rows::kWarpBytes * Shape::kShort.warps, Rows::kSumBytes}) {
    most = bytes > most ? bytes : most;
  }
  return most;
}

// The blocks of keys come first, those of the first keys before others: under a causal mask the
// longest before others. Those of rows follow in the same order if some have to wait; if all run at
// once the shortest go where the longest of keys are.
template <typename Shape>
__global__ void __launch_bounds__(Shape::kShort.threads(), Shape::kShort.blocks)
    backward_short_kernel(const __grid_constant__ BackwardArguments a, int key_blocks,
                          bool longest_first) {
  ptx::wait_for_earlier_kernels();
  extern __shared__ __align__(128) unsigned char memory[];
  static_assert(short_shared_bytes<Shape>() <= kLeastSharedBytes);
  const int item = blockIdx.x;
  if (item < key_blocks) {
    ShortKeys<Shape>(a, item).run(memory);
  } else {
    ShortRows<Shape>(a, longest_first ? gridDim.x - 1 - item : item - key_blocks).run(memory);
  }
}

}  // namespace fovea::cuda
