// A consumer: one warpgroup that owns 64 rows of a tile. While the tensor cores work on the scores
// of one block of keys, and on the values of the one before, the other warpgroups turn scores into
// weights; warpgroups take turns at asking for products.
#pragma once

#include "backend/cuda/hopper/forward/softmax.cuh"
#include "backend/cuda/hopper/forward/store.cuh"
#include "prim/cuda/ptx/wgmma.cuh"
#include "prim/cuda/tile/products.cuh"

namespace fovea::cuda::hopper {

template <typename Shape>
class Consumer {
  using T = typename Shape::Element;
  static constexpr ForwardConfig kC = Shape::kConfig;
  static constexpr int kTileKv = kC.tile_kv;
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
        d_q_(tile::matrix_descriptor(ptx::shared_address(s.q[warpgroup]), 16)),
        d_k_(tile::matrix_descriptor(ptx::shared_address(s.k), 16)),
        d_v_(tile::matrix_descriptor(ptx::shared_address(s.v), TileV::kPanelBytes)) {}

  __device__ __forceinline__ void run() {
    // The first turn is the first warpgroup's.
    if (warpgroup_ == kC.warpgroups - 1) ptx::barrier_arrive(kTurnBarrier, 2 * kWarpgroup);
    tile::Ring<kSlots> works(s_.work_ring);
    for (int count = 0;; ++count) {
      works.wait();
      const Work& work = s_.work[works.stage()];
      if (work.tile < 0) break;
      run_tile(work, count, s_.failed[works.stage()]);
      __syncwarp();
      if (lane() == 0) works.release();
      works.advance();
    }
    if (thread() == 0) ptx::tma_wait_stores();
  }

 private:
  static __device__ __forceinline__ int thread() { return threadIdx.x % kWarpgroup; }
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

  __device__ __forceinline__ void run_tile(const Work& work, int count, int& failed) {
    const int care = work.care;
    const RowsSeen seen(a_.p, work, work.row + warpgroup_ * kRowsOfWarpgroup);
    softmax_.start();
#pragma unroll
    for (int i = 0; i < kC.dim_v / 2; ++i) out_[i] = 0;
    ptx::mbarrier_wait(ptx::shared_address(s_.q_ring[warpgroup_].full), count & 1);
    int n = work.end - 1;
    const int begin = work.begin;
    if (n >= begin) {
      first_block(seen, n);
      // Blocks that some row does not see whole, and those until every row has a reference.
      bool settled = seen.all_see_some(n * kTileKv, kTileKv);
      for (--n; n >= begin && !(care == kBold && settled && seen.all(n * kTileKv, kTileKv)); --n) {
        if (care & kClean) clean_values();
        step<true>(seen, n);
        settled |= seen.all_see_some(n * kTileKv, kTileKv);
      }
      if constexpr (kC.unroll == 2) {
        for (; n > begin && seen.all((n - 1) * kTileKv, kTileKv); n -= 2) {
          step<false>(seen, n);
          step<false>(seen, n - 1);
        }
      }
      for (; n >= begin && seen.all(n * kTileKv, kTileKv); --n) step<false>(seen, n);
      for (; n >= begin; --n) step<true>(seen, n);
    }
    if (lane() == 0) ptx::mbarrier_arrive(ptx::shared_address(s_.q_ring[warpgroup_].empty));
    if (work.end > begin) {
      if (care & kClean) clean_values();
      last_block();
    }
    softmax_.finish();
    const int needed = softmax_.needed_care(out_) & ~care;
    if (__any_sync(0xffffffffu, needed != 0)) {
      const bool range = __any_sync(0xffffffffu, (needed & kSafe) != 0);
      if (lane() == 0) atomicOr(&failed, range ? kSafe : kSafe | kClean);
    }
    Epilogue<Shape>(a_, s_, work, warpgroup_).store(softmax_, out_, seen);
  }

  // Scores alone: there are no weights yet.
  __device__ __forceinline__ void first_block(const RowsSeen& seen, int n) {
    k_.wait();
    ptx::wgmma_fence();
    ptx::pin(scores_);
    issue_scores();
    ptx::wgmma_wait<0>();
    ptx::pin(scores_);
    if (lane() == 0) k_.release();
    k_.advance();
    seen.hide(scores_, n * kTileKv, kTileKv);
    softmax_.look(scores_, a_.to_log2);
    softmax_.weigh(scores_, a_.to_log2);
    pack_weights();
  }

  // Scores of block n, while the values of the block before it are added.
  template <bool kCareful>
  __device__ __forceinline__ void step(const RowsSeen& seen, int n) {
    k_.wait();
    ptx::barrier_sync(kTurnBarrier + warpgroup_, 2 * kWarpgroup);
    ptx::wgmma_fence();
    ptx::pin(scores_);
    issue_scores();
    v_.wait();
    ptx::wgmma_fence();
    issue_values();
    ptx::barrier_arrive(kTurnBarrier + (warpgroup_ + 1) % kC.warpgroups, 2 * kWarpgroup);
    ptx::wgmma_wait<1>();
    ptx::pin(scores_);
    if (lane() == 0) k_.release();
    k_.advance();
    bool moved;
    if constexpr (kCareful) {
      seen.hide(scores_, n * kTileKv, kTileKv);
      moved = softmax_.look(scores_, a_.to_log2);
      softmax_.weigh(scores_, a_.to_log2);
    } else {
      moved = softmax_.weigh_boldly(scores_, a_.to_log2);
    }
    ptx::wgmma_wait<0>();
    ptx::pin(out_);
    if (lane() == 0) v_.release();
    v_.advance();
    if (!kCareful && moved) softmax_.shrink(scores_);
    pack_weights();
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

  __device__ __forceinline__ void issue_scores() {
    const uint64_t k = d_k_ + tile::descriptor_step(k_.stage() * TileK::kBytes);
    ptx::wgmma_ss<T, true>(scores_, d_q_, k);
#pragma unroll
    for (int step = 1; step < kC.dim_qk / 16; ++step) {
      ptx::wgmma_ss<T, false>(scores_, d_q_ + tile::step_of_columns<TileQ>(step),
                              k + tile::step_of_columns<TileK>(step));
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void issue_values() {
    const uint64_t v = d_v_ + tile::descriptor_step(v_.stage() * TileV::kBytes);
#pragma unroll
    for (int step = 0; step < kTileKv / 16; ++step) {
      ptx::wgmma_rs<T>(out_, weights_ + 4 * step, v + tile::step_of_rows(step));
    }
    ptx::wgmma_commit();
  }

  // Scores' places in the accumulator are those of the next product's left operand.
  __device__ __forceinline__ void pack_weights() {
#pragma unroll
    for (int i = 0; i < kTileKv / 4; ++i) {
      weights_[i] = ptx::pack<T>(scores_[2 * i], scores_[2 * i + 1]);
    }
  }

  // Frees the next block of values of what is not finite. Every warpgroup does so for itself: what
  // another one writes is the same.
  __device__ __forceinline__ void clean_values() {
    v_.wait();
    const uint32_t s_v = ptx::shared_address(s_.v[v_.stage()]);
    for (int x = thread(); x < TileV::kBytes / 16; x += kWarpgroup) {
      make_finite(s_v + x * 16);
    }
    ptx::fence_async_shared();
    ptx::barrier_sync(kOwnBarrier + warpgroup_, kWarpgroup);
  }

  static __device__ __forceinline__ void make_finite(uint32_t at) {
    uint32_t w[4];
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(at));
#pragma unroll
    for (int x = 0; x < 4; ++x) w[x] = tile::finite_word<T>(w[x]);
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(w[0]), "r"(w[1]), "r"(w[2]),
                 "r"(w[3])
                 : "memory");
  }

  const ForwardArguments& a_;
  S& s_;
  const int warpgroup_;
  tile::Ring<kC.stages> k_, v_;
  const uint64_t d_q_, d_k_, d_v_;
  float scores_[kTileKv / 2], out_[kC.dim_v / 2];
  uint32_t weights_[kTileKv / 4];
  Softmax softmax_;
};

}  // namespace fovea::cuda::hopper
