// The kernel of a product of few rows with a weight. A block makes a tile of one warpgroup's rows:
// a warp asks TMA for the whole depth, as far as it fits, the others multiply what has come.
#pragma once

#include <cstddef>
#include <type_traits>

#include "prim/cuda/ptx/grid_dependency.cuh"
#include "prim/cuda/ptx/math.cuh"
#include "prim/cuda/ptx/registers.cuh"
#include "prim/cuda/ptx/tma.cuh"
#include "prim/cuda/ptx/wgmma.cuh"
#include "prim/cuda/tile/ring.cuh"
#include "prim/cuda/tile/swizzled.h"

namespace fovea::layers::cuda {

struct FewRowsProduct {
  CUtensorMap from;    // {channel, row, 1, member}
  CUtensorMap weight;  // {in, out, 1, 1}
  void* to = nullptr;
  int64_t to_batch = 0, to_row = 0;
  int rows = 0, row_tiles = 0;  // of a member of the batch
  int chunks = 0;               // of depth
  float scale = 1;
  bool settled = false, leaves_early = false;
};

constexpr int kFewRowsTile = 64;  // rows, and columns

template <typename T_, bool kGradient_>
struct FewRowsShape {
  using T = T_;
  static constexpr int kRows = kFewRowsTile, kCols = kFewRowsTile;
  static constexpr int kThreads = 128;  // that multiply; a warp more loads
  static constexpr int kDepth = tile::kPanelColumns, kStages = 4;
  static constexpr bool kGradient = kGradient_;
  static constexpr int kPitch = kCols + 8;  // of results: fragments are stored without conflicts
  using Left = tile::SwizzledTile<kRows, kDepth>;
  // As the weight lies: a gradient's depth runs over its rows.
  using Right = std::conditional_t<kGradient, tile::SwizzledTile<kDepth, kCols>,
                                   tile::SwizzledTile<kCols, kDepth>>;

  struct Shared {
    alignas(tile::kTileAlignment) unsigned char left[kStages][Left::kBytes];
    unsigned char right[kStages][Right::kBytes];
    T results[kRows * kPitch];
    tile::RingBarriers<kStages> ring;
  };
};

struct FewRowsTile {
  int member, row, col;
};

template <typename Shape>
__device__ __forceinline__ void load_few_rows(const FewRowsProduct& a, const FewRowsTile& tile,
                                              typename Shape::Shared& s) {
  ptx::tma_prefetch_map(a.from);
  ptx::tma_prefetch_map(a.weight);
  const auto load_weight = [&](const tile::Ring<Shape::kStages>& ring, int chunk) {
    const int depth = chunk * Shape::kDepth;
    const ptx::BoxAt at =
        Shape::kGradient ? ptx::BoxAt{tile.col, depth, 0, 0} : ptx::BoxAt{depth, tile.col, 0, 0};
    ptx::tma_load(ptx::shared_address(s.right[ring.stage()]), a.weight, at, ring.full());
  };
  const auto load_rows = [&](const tile::Ring<Shape::kStages>& ring, int chunk) {
    ptx::tma_load(ptx::shared_address(s.left[ring.stage()]), a.from,
                  {chunk * Shape::kDepth, tile.row, 0, tile.member}, ring.full());
  };
  constexpr int kBytes = Shape::Left::kBytes + Shape::Right::kBytes;
  tile::Ring<Shape::kStages> of_weights(s.ring), of_rows(s.ring);
  const int ahead = min(a.chunks, Shape::kStages);
  if (!a.settled) ptx::wait_for_earlier_kernels();
#pragma unroll 1
  for (int chunk = 0; chunk < ahead; ++chunk) {
    of_weights.acquire(kBytes);
    load_weight(of_weights, chunk);
    of_weights.advance();
  }
  if (a.settled) ptx::wait_for_earlier_kernels();
#pragma unroll 1
  for (int chunk = 0; chunk < ahead; ++chunk) {
    load_rows(of_rows, chunk);
    of_rows.advance();
  }
  if (a.leaves_early) ptx::let_next_kernel_begin();
#pragma unroll 1
  for (int chunk = ahead; chunk < a.chunks; ++chunk) {
    of_rows.acquire(kBytes);
    load_weight(of_rows, chunk);
    load_rows(of_rows, chunk);
    of_rows.advance();
  }
}

// The products of a chunk, queued.
template <typename Shape>
__device__ __forceinline__ void multiply_chunk(float (&sum)[Shape::kCols / 2],
                                               const typename Shape::Shared& s, int stage) {
  using T = typename Shape::T;
  constexpr int kSteps = Shape::kDepth / 16;
  const uint32_t left = ptx::shared_address(s.left[stage]);
  const uint32_t right = ptx::shared_address(s.right[stage]);
  if constexpr (Shape::kGradient) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane % 16;
    uint32_t rows[kSteps][4];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      ptx::ldmatrix_x4(rows[k], left + Shape::Left::offset(row, 2 * k + lane / 16));
    }
    const uint64_t columns = tile::matrix_descriptor(right, Shape::Right::kPanelBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      ptx::wgmma_rs<T>(sum, rows[k], columns + tile::step_of_rows(k));
    }
  } else {
    const uint64_t rows = tile::matrix_descriptor(left, 16);
    const uint64_t columns = tile::matrix_descriptor(right, 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      ptx::wgmma_ss<T, false>(sum, rows + tile::step_of_columns<typename Shape::Left>(k),
                              columns + tile::step_of_columns<typename Shape::Right>(k));
    }
  }
  ptx::wgmma_commit();
}

// Each warp stores its 16 rows, by way of shared memory, in pieces of 16 bytes.
template <typename Shape>
__device__ __forceinline__ void store_few_rows(const FewRowsProduct& a, const FewRowsTile& tile,
                                               const float (&sum)[Shape::kCols / 2],
                                               typename Shape::Shared& s) {
  using T = typename Shape::T;
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16;
  T* const results = s.results + first * Shape::kPitch;
#pragma unroll
  for (int n = 0; n < Shape::kCols / 8; ++n) {
#pragma unroll
    for (int y = 0; y < 2; ++y) {
      *reinterpret_cast<uint32_t*>(results + (y * 8 + lane / 4) * Shape::kPitch + n * 8 +
                                   lane % 4 * 2) =
          ptx::pack<T>(sum[4 * n + 2 * y] * a.scale, sum[4 * n + 2 * y + 1] * a.scale);
    }
  }
  __syncwarp();
  constexpr int kPieces = Shape::kCols / 8;  // of a row
  T* const to = static_cast<T*>(a.to) + tile.member * a.to_batch + tile.col;
#pragma unroll
  for (int i = 0; i < 16 * kPieces; i += 32) {
    const int r = (i + lane) / kPieces, piece = (i + lane) % kPieces;
    const int row = tile.row + first + r;
    if (row < a.rows) {
      *reinterpret_cast<uint4*>(to + row * a.to_row + piece * 8) =
          *reinterpret_cast<const uint4*>(results + r * Shape::kPitch + piece * 8);
    }
  }
}

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads + 32)
    few_rows_kernel(const __grid_constant__ FewRowsProduct a) {
  extern __shared__ __align__(tile::kTileAlignment) std::byte few_rows_shared[];
  auto& s = *reinterpret_cast<typename Shape::Shared*>(few_rows_shared);
  const int down = static_cast<int>(blockIdx.y), member = down / a.row_tiles;
  const FewRowsTile tile = {member, (down - member * a.row_tiles) * Shape::kRows,
                            static_cast<int>(blockIdx.x) * Shape::kCols};
  if (threadIdx.x == 0) {
    s.ring.init(Shape::kThreads / 32);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= Shape::kThreads) {
    if (threadIdx.x == Shape::kThreads) load_few_rows<Shape>(a, tile, s);
    return;
  }
  const tile::NumberedRing<Shape::kStages> ring(s.ring);
  const bool speaks = threadIdx.x % 32 == 0;
  // Operands in registers are no one's until their products have ended; of others a chunk's are
  // still under way when those of the next are asked for.
  constexpr int kPending = Shape::kGradient ? 0 : 1;
  float sum[Shape::kCols / 2] = {};
#pragma unroll 1
  for (int chunk = 0; chunk < a.chunks; ++chunk) {
    ring.wait(chunk);
    multiply_chunk<Shape>(sum, s, ring.stage(chunk));
    ptx::wgmma_wait<kPending>();
    if (speaks && chunk >= kPending) ring.release(chunk - kPending);
  }
  ptx::wgmma_wait<0>();
  ptx::pin(sum);
  store_few_rows<Shape>(a, tile, sum, s);
}

}  // namespace fovea::layers::cuda
