// A consumer: one warpgroup that owns 64 rows of a tile. While the tensor cores work on the scores
// of one block of keys, and on the values of the one before, the other warpgroups turn scores into
// weights; warpgroups take turns at asking for products.
#pragma once

#include "backend/cuda/common/softcap.cuh"
#include "backend/cuda/hopper/forward/products.cuh"
#include "backend/cuda/hopper/forward/softmax.cuh"
#include "backend/cuda/hopper/forward/store.cuh"

namespace fovea::cuda::hopper {

template <typename Shape>
class Consumer {
  using T = typename Shape::Element;
  static constexpr ForwardConfig kC = Shape::kConfig;
  static constexpr int kTileKv = kC.tile_kv;
  // Products of large head dims leave time for special functions, and few registers.
  static constexpr bool kSeries = kC.capped && kC.dim_qk <= 128;
  using S = Shared<Shape>;
  using TileQ = typename S::TileQ;
  using TileK = typename S::TileK;
  using TileV = typename S::TileV;

 public:
  __device__ __forceinline__ Consumer(const ForwardArguments& a, S& s, int warpgroup)
      : a_(a),
        s_(s),
        warpgroup_(warpgroup),
        k_(s.k_ring),
        v_(s.v_ring),
        q_(s.q_ring[warpgroup]),
        d_q_(tile::matrix_descriptor(ptx::shared_address(s.q[0][warpgroup]), 16)),
        d_k_(tile::matrix_descriptor(ptx::shared_address(s.k), 16)),
        d_v_(tile::matrix_descriptor(ptx::shared_address(s.v), TileV::kPanelBytes)) {}

  __device__ __forceinline__ void run() {
    // The first turn is the first warpgroup's.
    if (warpgroup_ == kC.warpgroups - 1) give_turn();
    tile::Ring<kSlots> works(s_.work_ring);
    bool more = begin_tile(works);
    ptx::wgmma_wait<0>();
    ptx::pin(scores_);
    if (more) judge_data(s_.work[works.stage()]);
    while (more) {
      const Work& work = s_.work[works.stage()];
      const RowsSeen seen = rows_seen(work);
      if (has_rows(work)) {
        add_blocks(work, seen);
        ask_for_care(care_of(work), s_.failed[works.stage()]);
      } else {
        pass_blocks(work);
      }
      const bool clean = (care_of(work) & kClean) != 0;
      const Epilogue<Shape> epilogue(a_, s_.out[warpgroup_], work, warpgroup_);
      if (clean) epilogue.store_clean(softmax_, out_, work, seen);
      __syncwarp();
      if (lane() == 0) works.release();
      works.advance();
      // Scores of the next tile, while outputs of this one are stored.
      more = begin_tile(works);
      if (!clean) epilogue.store(softmax_, out_);
      ptx::wgmma_wait<0>();
      ptx::pin(scores_);
    }
    if (thread() == 0) ptx::tma_wait_stores();
  }

 protected:
  static __device__ __forceinline__ int thread() { return threadIdx.x % kWarpgroup; }
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

  __device__ __forceinline__ RowsSeen rows_seen(const Work& work) const {
    return {a_.p, work, work.row + warpgroup_ * kRowsOfWarpgroup};
  }

  // Asks for the scores of a tile's first block; whether there is a tile. Where there is not, or no
  // block, the product is asked for all the same and means nothing: were it conditional, the
  // compiler would wait for it at once.
  __device__ __forceinline__ bool begin_tile(const tile::Ring<kSlots>& works) {
    works.wait();
    const Work& work = s_.work[works.stage()];
    const bool more = work.tile >= 0;
    if (more && has_rows(work)) {
      q_.wait();
      const int end = end_of_blocks(work, rows_seen(work));
      leave_out(k_, work.end - end);
      if (end > work.begin) k_.wait();
    }
    ptx::wgmma_fence();
    ptx::pin(scores_);
    issue_scores();
    return more;
  }

  // By the scores of the first block of all: where bold tiles would only have to be done again,
  // none is tried. One of few blocks is soon done again, and the look takes 0.35 us.
  __device__ __forceinline__ void judge_data(const Work& work) {
    constexpr int kFewBlocks = 16;
    if ((kC.capped && !kSeries) || work.end - work.begin < kFewBlocks) return;
    if (!has_rows(work) || end_of_blocks(work, rows_seen(work)) == work.begin) return;
    bool wild;
    if constexpr (kSeries) {
      wild = Softmax::are_past(scores_, a_.cap_series);
    } else {
      wild = Softmax::are_wild(scores_, a_.to_log2);
    }
    wild = __any_sync(0xffffffffu, wild);
    if (wild && lane() == 0) s_.usual_care[warpgroup_] = kSeries ? kFar : kSafe;
    ptx::barrier_sync(kOwnBarrier + warpgroup_, kWarpgroup);
  }

  // How carefully this warpgroup works on a tile; read where it is needed, for want of registers.
  __device__ __forceinline__ int care_of(const Work& work) const {
    return work.care | s_.usual_care[warpgroup_];
  }

  // Whether the tile, a sequence's first or last, has rows for this warpgroup. The compiler is told
  // that the answer is the same for all lanes: counters of rings are advanced by it.
  __device__ __forceinline__ bool has_rows(const Work& work) const {
    const int row = work.row + warpgroup_ * kRowsOfWarpgroup;
    const bool before = kC.fills_from_end() && row < 0;
    return __shfl_sync(0xffffffffu, !before && row < work.q_len, 0);
  }

  // A tile without rows for this warpgroup: all it does is to take part.
  __device__ __forceinline__ void pass_blocks(const Work& work) {
#pragma unroll 1
    for (int left = work.end - work.begin; left > 0; --left) {
      leave_out(k_, 1);
      if (left > 1) {
        wait_for_turn();
        give_turn();
      }
      leave_out(v_, 1);
    }
    q_.wait();
    release_queries();
  }

  // From the scores of the first block to the sums over all of them; where tiles are joined, to the
  // weights of the last.
  __device__ __forceinline__ void add_blocks(const Work& work, const RowsSeen& seen) {
    const int begin = work.begin;
    int n = end_of_blocks(work, seen) - 1;
    leave_out(v_, work.end - 1 - n);
    softmax_.start();
#pragma unroll
    for (int i = 0; i < kC.dim_v / 2; ++i) out_[i] = 0;
    if (n < begin) {
      release_queries();
      softmax_.finish();
      return;
    }
    if (lane() == 0) k_.release();
    k_.advance();
    cap();
    seen.hide(scores_, n * kTileKv, kTileKv);
    softmax_.look(scores_, a_.to_log2);
    softmax_.weigh(scores_, a_.to_log2);
    pack_weights<T>(weights_, scores_);
    // Blocks that every row sees whole, once each has a reference, are weighed without a look.
    const auto settles = [&](int block) {
      return (care_of(work) & ~kFar) == kBold && seen.all_see_some(block * kTileKv, kTileKv);
    };
    bool settled = settles(n);
    const auto is_bold = [&](int block) {
      return block >= begin && settled && seen.all(block * kTileKv, kTileKv);
    };
    --n;
    while (n >= begin) {
      for (; n >= begin && !is_bold(n); --n) {
        if (care_of(work) & kClean) clean_values();
        step<true>(seen, n);
        settled |= settles(n);
      }
      if constexpr (kC.unroll == 2) {
        for (; is_bold(n) && is_bold(n - 1); n -= 2) {
          step<false>(seen, n);
          step<false>(seen, n - 1);
        }
      }
      if constexpr (kSeries) {
        if (care_of(work) & kFar) {
          for (; is_bold(n); --n) step<false, true>(seen, n);
        }
      }
      for (; is_bold(n); --n) step<false>(seen, n);
    }
    release_queries();
    if constexpr (kC.joins_tiles()) return;
    if (care_of(work) & kClean) clean_values();
    last_block();
    softmax_.finish();
  }

  __device__ __forceinline__ void wait_for_turn() const {
    if (a_.schedule.turns) ptx::barrier_sync(kTurnBarrier + warpgroup_, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void give_turn() const {
    if (a_.schedule.turns) {
      ptx::barrier_arrive(kTurnBarrier + (warpgroup_ + 1) % kC.warpgroups, 2 * kWarpgroup);
    }
  }

  // The end of the blocks that this warpgroup works on.
  __device__ __forceinline__ int end_of_blocks(const Work& work, const RowsSeen& seen) const {
    if (a_.schedule.turns) return work.end;
    return max(min(work.end, (seen.any_end() + kTileKv - 1) / kTileKv), work.begin);
  }
  template <typename Ring>
  static __device__ __forceinline__ void leave_out(Ring& ring, int blocks) {
#pragma unroll 1
    for (; blocks > 0; --blocks) {
      ring.wait();
      if (lane() == 0) ring.release();
      ring.advance();
    }
  }

  __device__ __forceinline__ void release_queries() {
    if (lane() == 0) q_.release();
    q_.advance();
  }

  // Has the tile done again where it needs more care. Once scores of any warpgroup went out of
  // range, each does all that follows safely, from its next tile on: data is seldom so for one tile
  // alone.
  __device__ __forceinline__ void ask_for_care(int care, int& failed) {
    const int needed = softmax_.needed_care(out_) & ~care;
    const int next = kSeries && (care & (kFar | kSafe)) == 0 ? kFar : kSafe;
    // Asked of all its warps together, for they have to go the same way; each then writes the
    // answer for itself.
    const bool range = ptx::barrier_or(kOwnBarrier + warpgroup_, kWarpgroup,
                                       ((needed & kSafe) | (s_.out_of_range & next)) != 0);
    if (range && lane() == 0) {
      s_.usual_care[warpgroup_] = next;
      s_.out_of_range = next;
    }
    __syncwarp();
    if (needed != 0) atomicOr(&failed, (needed & kSafe) != 0 ? next : kSafe | kClean);
  }

  // Scores of block n, while the values of the block before it are added. kFarScores: also those
  // that softcap's series is not for.
  template <bool kCareful, bool kFarScores = !kSeries>
  __device__ __forceinline__ void step(const RowsSeen& seen, int n) {
    k_.wait();
    wait_for_turn();
    ptx::wgmma_fence();
    ptx::pin(scores_);
    issue_scores();
    v_.wait();
    ptx::wgmma_fence();
    issue_values();
    give_turn();
    ptx::wgmma_wait<1>();
    ptx::pin(scores_);
    if (lane() == 0) k_.release();
    k_.advance();
    bool moved;
    if constexpr (kCareful) {
      cap();
      seen.hide(scores_, n * kTileKv, kTileKv);
      moved = softmax_.look(scores_, a_.to_log2);
      softmax_.weigh(scores_, a_.to_log2);
    } else if constexpr (kFarScores) {
      cap();
      moved = softmax_.weigh_boldly(scores_, a_.to_log2);
    } else {
      moved = softmax_.cap_and_weigh_boldly(scores_, a_.cap_series);
    }
    ptx::wgmma_wait<0>();
    ptx::pin(out_);
    if (lane() == 0) v_.release();
    v_.advance();
    if (!kCareful && moved) softmax_.shrink(scores_);
    pack_weights<T>(weights_, scores_);
    if (moved) softmax_.rescale(out_);
  }

  __device__ __forceinline__ void last_block() {
    v_.wait();
    ptx::wgmma_fence();
    ptx::pin(out_);
    issue_values();
    ptx::wgmma_wait<0>();
    ptx::pin(out_);
    if (lane() == 0) v_.release();
    v_.advance();
  }

  __device__ __forceinline__ void cap() {
    if constexpr (kC.capped) cap_scores<kSeries>(scores_, a_.p.scale_of_cap);
  }

  __device__ __forceinline__ void issue_scores() {
    hopper::issue_scores<T, TileQ, TileK>(
        scores_, d_q_ + tile::descriptor_step(q_.stage() * int{sizeof(s_.q[0])}),
        d_k_ + tile::descriptor_step(k_.stage() * TileK::kBytes));
  }
  __device__ __forceinline__ void issue_values() {
    hopper::issue_values<T>(out_, weights_,
                            d_v_ + tile::descriptor_step(v_.stage() * TileV::kBytes));
  }

  // Frees the next block of values of what is not finite. Every warpgroup does so for itself: what
  // another one writes is the same.
  __device__ __forceinline__ void clean_values() {
    v_.wait();
    const uint32_t s_v = ptx::shared_address(s_.v[v_.stage()]);
    for (int x = thread(); x < TileV::kBytes / 16; x += kWarpgroup) {
      make_finite<T>(s_v + x * 16);
    }
    ptx::fence_async_shared();
    ptx::barrier_sync(kOwnBarrier + warpgroup_, kWarpgroup);
  }

  const ForwardArguments& a_;
  S& s_;
  const int warpgroup_;
  tile::Ring<kC.stages> k_, v_;
  tile::Ring<kC.q_stages()> q_;
  const uint64_t d_q_, d_k_, d_v_;
  float scores_[kTileKv / 2], out_[kC.dim_v / 2];
  uint32_t weights_[kTileKv / 4];
  Softmax softmax_;
};

}  // namespace fovea::cuda::hopper
