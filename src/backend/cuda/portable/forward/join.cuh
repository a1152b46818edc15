// What a block leaves behind whose warps hold the same rows, each for its share of the keys: they
// put their sums into shared memory, and every thread joins a piece of a row of all of them.
#pragma once

#include "backend/cuda/portable/forward/epilogue.cuh"

namespace fovea::cuda {

template <typename Shape>
class JoiningEpilogue {
  using T = typename Shape::Element;
  static constexpr ForwardConfig kC = Shape::kConfig;
  static constexpr int kM = kC.m_tiles, kOut = kC.dim_v / 8, kSharing = kC.key_warps;
  static constexpr int kRows = 16 * kM;                // of a warp
  static constexpr int kRowBytes = kC.dim_v * 4 + 32;  // so that rows begin in different banks
  static constexpr int kStatBytes = kC.warps * kRows * 8;
  static_assert(sizeof(T) == 2 && kStatBytes + kC.warps * kRows * kRowBytes <= kC.shared_bytes());

 public:
  // `shared`: the block's, which nobody reads any more.
  __device__ __forceinline__ JoiningEpilogue(const ForwardArguments& a, const Place& place,
                                             uint32_t shared)
      : a_(a), place_(place), s_stats_(shared), s_sums_(shared + kStatBytes) {}

  __device__ __forceinline__ void store(const RunningSoftmax<kM>& softmax,
                                        const ptx::Fragment (&out)[kM][kOut]) const {
    leave(softmax, out);
    __syncthreads();
    constexpr int kPieces = kC.dim_v / 8;
    for (int x = threadIdx.x; x < kC.tile_q() * kPieces; x += kC.threads()) {
      const int row = x / kPieces, col = x % kPieces * 8;
      if (row < place_.rows && col < a_.p.dim_v) store_piece(row, col);
    }
  }

 private:
  // Of row r of a warp.
  __device__ __forceinline__ uint32_t stats_at(int warp, int r) const {
    return s_stats_ + (warp * kRows + r) * 8;
  }
  __device__ __forceinline__ uint32_t sums_at(int warp, int r) const {
    return s_sums_ + (warp * kRows + r) * kRowBytes;
  }

  __device__ __forceinline__ void leave(const RunningSoftmax<kM>& softmax,
                                        const ptx::Fragment (&out)[kM][kOut]) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      const int r = i / 2 * 16 + i % 2 * 8 + lane / 4;
      if (lane % 4 == 0) {
        tile::store_float2(stats_at(warp, r), {softmax.reference[i], softmax.sum[i]});
      }
      const uint32_t to = sums_at(warp, r) + lane % 4 * 8;
#pragma unroll
      for (int d = 0; d < kOut; ++d) {
        const ptx::Fragment& f = out[i / 2][d];
        tile::store_float2(to + d * 32, {f[i % 2 * 2], f[i % 2 * 2 + 1]});
      }
    }
  }

  // Eight columns of a row.
  __device__ __forceinline__ void store_piece(int row, int col) const {
    const int warp = row / kRows * kSharing, r = row % kRows;
    float2 stats[kSharing];
    float reference = -kInfinity;
#pragma unroll
    for (int s = 0; s < kSharing; ++s) {
      stats[s] = tile::load_float2(stats_at(warp + s, r));
      reference = fmaxf(reference, stats[s].x);
    }
    float sum = 0, x[8] = {};
#pragma unroll
    for (int s = 0; s < kSharing; ++s) {
      // A warp that saw no key of the row has no reference.
      const float part = stats[s].x == -kInfinity ? 0.0f : ptx::exp2_approx(stats[s].x - reference);
      sum = fmaf(stats[s].y, part, sum);
      const uint32_t from = sums_at(warp + s, r) + col * 4;
      const float4 low = tile::load_float4(from), high = tile::load_float4(from + 16);
      const float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int y = 0; y < 8; ++y) x[y] = fmaf(values[y], part, x[y]);
    }
    if (a_.parts.count > 1) {
      float* const to = partial_row(a_, place_) + int64_t{row} * a_.p.dim_v + col;
#pragma unroll
      for (int y = 0; y < 8; ++y) {
        if (col + y < a_.p.dim_v) to[y] = x[y];
      }
      if (col == 0) a_.parts.stats[partial_index(a_, place_) + row] = {reference, sum};
      return;
    }
    const float inverse = sum == 0 ? 0.0f : __fdividef(1.0f, sum);
    uint4 words;
    words.x = ptx::pack<T>(x[0] * inverse, x[1] * inverse);
    words.y = ptx::pack<T>(x[2] * inverse, x[3] * inverse);
    words.z = ptx::pack<T>(x[4] * inverse, x[5] * inverse);
    words.w = ptx::pack<T>(x[6] * inverse, x[7] * inverse);
    store_words(out_row<T>(a_, place_, row) + col, words, a_.p.dim_v - col, a_.vector_out);
    if (col == 0 && a_.lse.data != nullptr) store_lse(a_, place_, row, reference, sum);
  }

  const ForwardArguments& a_;
  const Place& place_;
  const uint32_t s_stats_, s_sums_;
};

}  // namespace fovea::cuda
