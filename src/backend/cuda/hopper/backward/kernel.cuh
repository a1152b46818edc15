// The kernel: a block a tile of keys, one warpgroup that loads, two that compute.
#pragma once

#include "backend/cuda/hopper/backward/compute.cuh"
#include "backend/cuda/hopper/backward/load.cuh"
#include "prim/cuda/ptx/barrier.cuh"
#include "prim/cuda/ptx/grid_dependency.cuh"

namespace fovea::cuda::hopper {

inline constexpr int kKeysBarrier = 1;  // of the threads that compute

// K for dQ, without what is not finite: what sees such a key has a gradient that is not finite.
template <typename Shape>
__device__ __forceinline__ void load_finite_keys(const cuda::BackwardArguments& a,
                                                 BackwardShared<Shape>& s) {
  using T = typename Shape::Element;
  using TileK = typename BackwardShared<Shape>::TileK;
  const Place& place = s.work.place;
  for (int x = threadIdx.x; x < TileK::kRows * TileK::kPieces;
       x += Shape::kConfig.computing_threads()) {
    const int row = x / TileK::kPieces, piece = x % TileK::kPieces, key = place.key_begin + row;
    uint4 w = {0, 0, 0, 0};
    if (key < place.key_end) {
      w = *reinterpret_cast<const uint4*>(rows_at<const T>(a.k, place.s, key, place.head_kv) +
                                          8 * piece);
    }
    *reinterpret_cast<uint4*>(s.k + TileK::offset(row, piece)) = {
        tile::finite_word<T>(w.x), tile::finite_word<T>(w.y), tile::finite_word<T>(w.z),
        tile::finite_word<T>(w.w)};
  }
  ptx::fence_async_shared();
}

// Three ones of bf16 a row, which parts of delta and lse are multiplied by; wgmma sees them with
// the keys.
template <typename Shape>
__device__ __forceinline__ void put_ones(BackwardShared<Shape>& s) {
  constexpr uint32_t kOne = 0x3f80;
  if (threadIdx.x < sizeof(s.ones) / sizeof(*s.ones)) {
    s.ones[threadIdx.x] = {kOne << 16 | kOne, kOne, 0, 0};
  }
}

// Rows of a head that see a key.
template <typename Shape>
__device__ __forceinline__ void find_seeing_rows(const Problem& p, BackwardShared<Shape>& s) {
  const Place& place = s.work.place;
  for (int x = threadIdx.x; x < Shape::kConfig.keys(); x += Shape::kConfig.computing_threads()) {
    const int key = place.key_begin + x;
    s.seeing[x] = seeing_rows(p, place.s, key, min(key + 1, place.s.kv_len));
  }
}

template <typename Shape, bool kExponents>
__global__ void __launch_bounds__(Shape::kConfig.threads(), 1)
    backward_kernel(const __grid_constant__ BackwardArguments arguments) {
  constexpr BackwardConfig kC = Shape::kConfig;
  extern __shared__ __align__(tile::kTileAlignment) unsigned char memory[];
  auto& shared = *reinterpret_cast<BackwardShared<Shape>*>(memory);
  ptx::wait_for_earlier_kernels();
  if (threadIdx.x == 0) {
    shared.init(loaders(kExponents));
    shared.work.find(arguments.a);
  }
  __syncthreads();
  // The same for all lanes, said so that addresses can be in uniform registers.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  if (warpgroup == kC.warpgroups) {
    ptx::give_registers<kLoaderRegisters>();
    if (threadIdx.x < kC.computing_threads() + loaders(kExponents)) {
      RowLoader<Shape, kExponents>(arguments, shared).run();
    }
  } else {
    ptx::take_registers<kComputerRegisters>();
    put_ones<Shape>(shared);
    load_finite_keys<Shape>(arguments.a, shared);
    find_seeing_rows<Shape>(arguments.a.p, shared);
    ptx::barrier_sync(kKeysBarrier, kC.computing_threads());
    KeyGroup<Shape, kExponents>(arguments.a, shared, warpgroup).run();
  }
}

}  // namespace fovea::cuda::hopper
