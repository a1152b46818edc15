// The warps that load: query rows and their gradients by TMA, what is known of them by themselves.
#pragma once

#include "backend/cuda/hopper/backward/shared.cuh"
#include "backend/cuda/portable/backward/element.cuh"
#include "prim/cuda/ptx/tma.cuh"

namespace fovea::cuda::hopper {

template <typename Shape, bool kExponents>
class RowLoader {
  using T = typename Shape::Element;
  using S = BackwardShared<Shape>;
  using TileQ = typename S::TileQ;
  static constexpr int kRows = Shape::kConfig.rows(), kThreads = loaders(kExponents);
  static constexpr float kLeastExponent = -1e38f;  // finite, for it is multiplied by zeros too
  static constexpr uint32_t kBadPart = 0x7fc0;     // NaN

 public:
  __device__ __forceinline__ RowLoader(const BackwardArguments& arguments, S& s)
      : maps_(arguments), a_(arguments.a), s_(s), ring_(s.rows_ring) {}

  __device__ __forceinline__ void run() {
    WalkedTile<Shape> at(s_.work);
    int looked = 0;
#pragma unroll 1
    for (int t = 0; t < s_.work.count; ++t) {
      ring_.wait_for_room(t);
      // Rows that do not see all keys must be finite: zero weights are multiplied by them.
      const int2 clear = s_.work.clear;
      const bool whole = at.row >= clear.x && at.row + kRows <= clear.y;
      load(t, at, whole ? ring_.full(t) : ptx::shared_address(&s_.landed));
      if (!whole) {
        ptx::mbarrier_wait(ptx::shared_address(&s_.landed), looked++ & 1);
        make_finite(t);
        ptx::mbarrier_arrive(ring_.full(t));
        if (thread() == 0) ptx::mbarrier_arrive(ring_.full(t));
      }
      at.advance();
    }
  }

 private:
  static __device__ __forceinline__ int thread() { return threadIdx.x % kThreads; }

  __device__ __forceinline__ void load(int t, const WalkedTile<Shape>& at, uint32_t barrier) const {
    const Place& place = s_.work.place;
    const int stage = ring_.stage(t), head = place.head_kv * a_.p.group + at.head;
    if (thread() == 0) {
      ptx::mbarrier_arrive_expect(barrier, 2 * TileQ::kBytes);
      const ptx::BoxAt box = {0, at.row, head, place.b};
      ptx::tma_load(ptx::shared_address(s_.q[stage]), maps_.q, box, barrier);
      ptx::tma_load(ptx::shared_address(s_.dout[stage]), maps_.dout, box, barrier);
    }
    constexpr int kOwn = kRows / kThreads;
    const int64_t from = stat_index(a_, place.s, head, at.row) + thread();
    float lse2[kOwn], delta[kOwn];
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      const bool real = at.row + kThreads * r + thread() < place.s.q_len;
      lse2[r] = real ? a_.lse2[from + kThreads * r] : 0.0f;
      delta[r] = real ? a_.delta[from + kThreads * r] : 0.0f;
    }
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      const int row = kThreads * r + thread();
      if constexpr (kExponents) {
        s_.minus_lse[stage][row] = S::parts_of(lse2[r] == kInfinity ? kLeastExponent : -lse2[r]);
      } else {
        s_.lse2(stage)[row] = lse2[r];
      }
      s_.delta[stage][row] = S::parts_of(-delta[r]);
    }
    ptx::fence_async_shared();
    ptx::mbarrier_arrive(barrier);
  }

  // Rows of q or dout that are not finite become so, and weights of what they see NaN instead.
  __device__ __forceinline__ void make_finite(int t) const {
    const int stage = ring_.stage(t);
#pragma unroll(kExponents ? 2 : 4)
    for (int x = thread(); x < 2 * kRows * TileQ::kPieces; x += kThreads) {
      const int row = x / (2 * TileQ::kPieces), piece = x % TileQ::kPieces;
      unsigned char* const tile = x / TileQ::kPieces % 2 == 0 ? s_.q[stage] : s_.dout[stage];
      uint4& w = *reinterpret_cast<uint4*>(tile + TileQ::offset(row, piece));
      const uint4 old = w;
      const uint32_t found = tile::nonfinite_bits<T>(old.x) | tile::nonfinite_bits<T>(old.y) |
                             tile::nonfinite_bits<T>(old.z) | tile::nonfinite_bits<T>(old.w);
      if ((found & tile::kNonfinite) == 0) continue;
      w = {tile::finite_word<T>(old.x), tile::finite_word<T>(old.y), tile::finite_word<T>(old.z),
           tile::finite_word<T>(old.w)};
      if constexpr (kExponents) {
        s_.minus_lse[stage][row].x = kBadPart;
      } else {
        s_.lse2(stage)[row] = __uint_as_float(kBadDout);
      }
    }
    ptx::fence_async_shared();
    // Not for what it does: without it ptxas spills the registers of one kernel, with it the
    // products of the other come in an order that takes up to 4 % longer.
    if constexpr (!kExponents) __syncwarp();
  }

  const BackwardArguments& maps_;
  const cuda::BackwardArguments& a_;
  S& s_;
  const tile::NumberedRing<Shape::kConfig.stages> ring_;
};

}  // namespace fovea::cuda::hopper
