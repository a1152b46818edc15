// dQ of the blocks of small heads: two ways to add up over the keys of a block before the sums in
// the workspace are touched. Where a warp holds many keys, it multiplies its own gradients of
// scores, and the products of the warps meet in shared memory; where it holds few, the gradients of
// scores meet there, and each warp multiplies those of some rows.
#pragma once

#include "backend/cuda/portable/backward/sums.cuh"
#include "prim/cuda/ptx/movmatrix.cuh"
#include "prim/cuda/tile/products.cuh"

namespace fovea::cuda {

// A value that the compiler does not compute again where it is used.
__device__ __forceinline__ uint32_t held(uint32_t x) {
  return __shfl_sync(0xffffffffu, x, threadIdx.x % 32);
}

// Both have two stages, so that a stage is summed while the next is made.
template <typename Shape>
class DqOfProducts {
  using T = typename Shape::Element;
  static constexpr BackwardConfig kC = Shape::kOnePass;
  static constexpr int kD = kC.dim_qk / 16, kM = kC.key_m_tiles, kTileQ = kC.key_tile_q;
  static constexpr int kFragments = kC.dim_qk / 8;  // of 16 rows
  static constexpr int kWarpBytes = kTileQ * kC.dim_qk * 4;
  static constexpr int kStageBytes = kC.key_warps * kWarpBytes;
  using TileK = tile::SharedTile<T, kC.key_tile(), kC.dim_qk>;

 public:
  static constexpr int kBytes = BackwardConfig::kStages * kStageBytes;
  static constexpr bool kKeepsKeys = false;  // in shared memory

  // Values that are not finite stay out: what sees such a key has a gradient that is not finite.
  __device__ __forceinline__ DqOfProducts(uint32_t shared, uint32_t s_k, int first_key)
      : shared_(shared),
        mine_(held(shared + threadIdx.x / 32 * kWarpBytes + threadIdx.x % 32 * 16)) {
    const auto at = TileK::Lane::rows_first();
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int d = 0; d < kD; ++d) {
        ptx::ldmatrix_x4_trans(keys_[m][d], s_k + at.at(first_key + 16 * m, d * 16));
#pragma unroll
        for (int x = 0; x < 4; ++x) keys_[m][d][x] = tile::finite_word<T>(keys_[m][d][x]);
      }
    }
  }

  // The sum of one warp's keys for 16 rows.
  struct Part {
    ptx::Fragment sum[1][kFragments];
  };
  __device__ __forceinline__ void begin(Part& part) const { tile::clear(part.sum); }
  __device__ __forceinline__ void add(Part& part, int m, const uint32_t (&ds)[4], int, int) const {
    const uint32_t a[4] = {ptx::transpose_8x8(ds[0]), ptx::transpose_8x8(ds[2]),
                           ptx::transpose_8x8(ds[1]), ptx::transpose_8x8(ds[3])};
#pragma unroll
    for (int d = 0; d < kD; ++d) {
      ptx::mma_m16n8k16<T>(part.sum[0][2 * d], a, keys_[m][d][0], keys_[m][d][1]);
      ptx::mma_m16n8k16<T>(part.sum[0][2 * d + 1], a, keys_[m][d][2], keys_[m][d][3]);
    }
  }
  // Fragments as they are: what is stored of one has to be in registers that follow each other.
  __device__ __forceinline__ void end(const Part& part, int stage, int chunk) const {
    const uint32_t to = mine_ + stage * kStageBytes + chunk * (kC.dim_qk * 4);
#pragma unroll
    for (int n = 0; n < kFragments; ++n) {
      const ptx::Fragment& x = part.sum[0][n];
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + n * 512), "f"(x[0]),
                   "f"(x[1]), "f"(x[2]), "f"(x[3])
                   : "memory");
    }
  }
  __device__ __forceinline__ void nothing(int stage, int chunk) const {
    Part none;
    begin(none);
    end(none, stage, chunk);
  }

  // Adds what all warps have stored to the tile of sums `to`.
  __device__ __forceinline__ void flush(int stage, float* to) const {
    static_assert(kTileQ % (16 * kC.key_warps) == 0);
    const uint32_t from = shared_ + stage * kStageBytes + threadIdx.x % 32 * 16;
#pragma unroll
    for (int of_warps = 0; of_warps < kTileQ; of_warps += 16 * kC.key_warps) {
      const int chunk = of_warps + threadIdx.x / 32 * 16;
      ptx::Fragment sum[kFragments];
#pragma unroll
      for (int n = 0; n < kFragments; ++n) {
        const uint32_t at = from + chunk * (kC.dim_qk * 4) + n * 512;
        float4 x = tile::load_float4(at);
#pragma unroll
        for (int warp = 1; warp < kC.key_warps; ++warp) {
          const float4 y = tile::load_float4(at + warp * kWarpBytes);
          x = {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w};
        }
        sum[n][0] = x.x;
        sum[n][1] = x.y;
        sum[n][2] = x.z;
        sum[n][3] = x.w;
      }
      add_to_sums<kC.dim_qk>(to, chunk, 0, sum);
    }
  }

 private:
  const uint32_t shared_, mine_;
  uint32_t keys_[kM][kD][4];  // depth along keys
};

template <typename Shape>
class DqOfScores {
  using T = typename Shape::Element;
  static constexpr BackwardConfig kC = Shape::kOnePass;
  static constexpr int kD = kC.dim_qk / 16, kM = kC.key_m_tiles, kTileQ = kC.key_tile_q;
  using TileK = tile::SharedTile<T, kC.key_tile(), kC.dim_qk>;
  using TileDs = tile::SharedTile<T, kC.key_tile(), kTileQ>;  // a key a row
  static_assert(kTileQ == 64);

 public:
  static constexpr int kBytes = BackwardConfig::kStages * TileDs::kBytes;
  static constexpr bool kKeepsKeys = true;

  __device__ __forceinline__ DqOfScores(uint32_t shared, uint32_t s_k, int first_key) {
    const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
    store_ = held(shared + TileDs::offset(first_key + lane % 16, lane / 16));
#else
    store_ = held(shared + TileDs::offset(first_key + lane / 4, 0) + lane % 4 * 4);
#endif
    const int row = threadIdx.x / 32 * 16;
    load_ = held(shared + TileDs::Lane::columns_first().at(0, row));
    keys_ = held(s_k + TileK::Lane::rows_first().at(0, 0));
    // Every warp has its fragments of keys; those for dq are without what is not finite: what sees
    // such a key has a gradient that is not finite.
    __syncthreads();
    for (int x = threadIdx.x; x < TileK::kBytes / 16; x += kC.key_threads()) {
      uint32_t w[4];
      asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                   : "r"(s_k + x * 16));
      asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(s_k + x * 16),
                   "r"(tile::finite_word<T>(w[0])), "r"(tile::finite_word<T>(w[1])),
                   "r"(tile::finite_word<T>(w[2])), "r"(tile::finite_word<T>(w[3]))
                   : "memory");
    }
  }

  struct Part {};
  __device__ __forceinline__ void begin(Part&) const {}
  __device__ __forceinline__ void add(Part&, int m, const uint32_t (&ds)[4], int stage,
                                      int chunk) const {
    const uint32_t to = (store_ ^ (chunk * 2)) + stage * TileDs::kBytes + m * 16 * 128;
#if __CUDA_ARCH__ >= 900
    ptx::stmatrix_x4(to, ds);
#else
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      asm volatile("st.shared.b32 [%0], %1;" ::"r"((to ^ (x / 2 * 16)) + x % 2 * 8 * 128),
                   "r"(ds[x])
                   : "memory");
    }
#endif
  }
  __device__ __forceinline__ void end(const Part&, int, int) const {}
  __device__ __forceinline__ void nothing(int stage, int chunk) const {
    Part part;
    const uint32_t none[4] = {0, 0, 0, 0};
#pragma unroll
    for (int m = 0; m < kM; ++m) add(part, m, none, stage, chunk);
  }

  // Each warp 16 rows, in two sums of every other 16 keys: neither waits for the other.
  __device__ __forceinline__ void flush(int stage, float* to) const {
    static_assert(kTileQ == 16 * kC.key_warps);
    ptx::Fragment dq[2][2 * kD];
    tile::clear(dq);
#pragma unroll
    for (int k = 0; k < kC.key_tile(); k += 16) {
      uint32_t a[4];
      ptx::ldmatrix_x4_trans(a, load_ + stage * TileDs::kBytes + k * 128);
#pragma unroll
      for (int d = 0; d < kD; ++d) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, (keys_ ^ (d * 32)) + k * (kC.dim_qk * 2));
        ptx::mma_m16n8k16<T>(dq[k / 16 % 2][2 * d], a, b[0], b[1]);
        ptx::mma_m16n8k16<T>(dq[k / 16 % 2][2 * d + 1], a, b[2], b[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < 2 * kD; ++n) {
#pragma unroll
      for (int x = 0; x < 4; ++x) dq[0][n][x] += dq[1][n][x];
    }
    add_to_sums<kC.dim_qk>(to, threadIdx.x / 32 * 16, 0, dq[0]);
  }

 private:
  uint32_t store_, load_, keys_;  // addresses of this lane
};

}  // namespace fovea::cuda
