// The kernel: one block an SM, one warpgroup that loads, two to four that compute.
#pragma once

#include <type_traits>

#include "backend/cuda/hopper/forward/compute.cuh"
#include "backend/cuda/hopper/forward/joined.cuh"
#include "backend/cuda/hopper/forward/load.cuh"
#include "prim/cuda/ptx/grid_dependency.cuh"

namespace fovea::cuda::hopper {

template <typename Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), 1)
    forward_kernel(const __grid_constant__ ForwardArguments a) {
  constexpr ForwardConfig kC = Shape::kConfig;
  using Loads = std::conditional_t<kC.joins_tiles(), JoinedProducer<Shape>, Producer<Shape>>;
  using Computes = std::conditional_t<kC.joins_tiles(), JoinedConsumer<Shape>, Consumer<Shape>>;
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<Shape>*>(memory);
  ptx::let_next_kernel_begin();
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  // The same for all lanes, said so that addresses can be in uniform registers.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  if (warpgroup == kC.warpgroups) {
    ptx::give_registers<kC.giver()>();
    if (threadIdx.x == kC.warpgroups * kWarpgroup) Loads(a, shared).run();
  } else {
    ptx::take_registers<kC.taker()>();
    Computes(a, shared, warpgroup).run();
  }
}

}  // namespace fovea::cuda::hopper
