// Short tiles: the last product of one and the first of the next are asked for together, in one
// turn, so that the tensor cores have work while outputs are stored. That wants the next tile's
// queries in time: it is claimed, and they are asked for, when this one has hardly begun. Every
// tile has a block of keys, if only one of which nothing is seen, and warpgroups always take turns.
#pragma once

#include "backend/cuda/hopper/forward/compute.cuh"
#include "backend/cuda/hopper/forward/load.cuh"

namespace fovea::cuda::hopper {

template <typename Shape>
class JoinedConsumer : public Consumer<Shape> {
  using Base = Consumer<Shape>;
  using Base::a_, Base::s_, Base::warpgroup_, Base::k_, Base::v_, Base::q_;
  using Base::issue_scores, Base::issue_values;
  using Base::lane, Base::thread, Base::rows_seen, Base::care_of, Base::has_rows;
  using Base::scores_, Base::out_, Base::softmax_;
  using Base::wait_for_turn, Base::give_turn, Base::leave_out, Base::release_queries;
  using Works = tile::Ring<kSlots>;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    // The first turn is the first warpgroup's.
    if (warpgroup_ == Shape::kConfig.warpgroups - 1) give_turn();
    Works works(s_.work_ring);
    int tile = begin_tile(works);
    if (tile != kNoTile) this->judge_data(s_.work[works.stage()]);
    for (;;) {
      if (tile == kPerhaps) tile = begin_tile(works);
      if (tile == kNoTile) break;
      const Work& work = s_.work[works.stage()];
      if (has_rows(work)) {
        this->add_blocks(work, rows_seen(work));
      } else {
        pass_blocks(work);
      }
      const Works done = works;
      works.advance();
      const Epilogue<Shape> epilogue(a_, s_.out[warpgroup_], work, warpgroup_);
      if ((care_of(work) & kClean) != 0) {
        end_clean_tile(work, epilogue, done);
        tile = kPerhaps;
        continue;
      }
      // Scores are asked for always, for what is conditional the compiler waits for at once; where
      // there is no next tile they mean nothing.
      v_.wait();
      wait_for_turn();
      ptx::wgmma_fence();
      ptx::pin(out_);
      issue_values();
      tile = wait_for_tile(works);
      ptx::wgmma_fence();
      ptx::pin(scores_);
      issue_scores();
      give_turn();
      softmax_.finish();
      ptx::wgmma_wait<1>();
      check_tile(work, done);
      release(done);
      epilogue.store(softmax_, out_);
      ptx::wgmma_wait<0>();
      ptx::pin(scores_);
    }
    if (thread() == 0) ptx::tma_wait_stores();
  }

 private:
  // The scores of the first block of a tile that none before it asked for; what wait_for_tile says,
  // when it is known.
  __device__ __forceinline__ int begin_tile(Works& works) {
    int tile;
    while ((tile = wait_for_tile(works)) == kPerhaps) {
      release(works);
      works.advance();
    }
    if (tile == kNoTile) return tile;
    ptx::wgmma_fence();
    ptx::pin(scores_);
    issue_scores();
    ptx::wgmma_wait<0>();
    ptx::pin(scores_);
    return tile;
  }

  // Waits for what the scores of a tile's first block need; Work::tile.
  __device__ __forceinline__ int wait_for_tile(const Works& works) {
    works.wait();
    const Work& work = s_.work[works.stage()];
    const int tile = work.tile;
    if (tile >= 0 && has_rows(work)) {
      q_.wait();
      k_.wait();
    }
    return tile;
  }

  // A tile without rows for this warpgroup: all it does is to take part, up to the last product,
  // whose result means nothing.
  __device__ __forceinline__ void pass_blocks(const Work& work) {
    leave_out(k_, 1);
#pragma unroll 1
    for (int left = work.end - work.begin; left > 1; --left) {
      leave_out(k_, 1);
      wait_for_turn();
      give_turn();
      leave_out(v_, 1);
    }
    q_.wait();
    release_queries();
  }

  // After a tile's last product.
  __device__ __forceinline__ void check_tile(const Work& work, const Works& done) {
    ptx::pin(out_);
    if (lane() == 0) v_.release();
    v_.advance();
    if (has_rows(work)) this->ask_for_care(care_of(work), s_.failed[done.stage()]);
  }

  // The end of a tile whose values may not be finite: with nothing of the next one under way.
  __device__ __forceinline__ void end_clean_tile(const Work& work, const Epilogue<Shape>& epilogue,
                                                 const Works& done) {
    wait_for_turn();
    give_turn();
    this->clean_values();
    ptx::wgmma_fence();
    ptx::pin(out_);
    issue_values();
    softmax_.finish();
    ptx::wgmma_wait<0>();
    check_tile(work, done);
    epilogue.store_clean(softmax_, out_, work, rows_seen(work));
    release(done);
  }

  // When no lane of the warp reads what the stage holds any more.
  static __device__ __forceinline__ void release(const Works& works) {
    __syncwarp();
    if (lane() == 0) works.release();
  }
};

template <typename Shape>
class JoinedProducer : public Producer<Shape> {
  static constexpr ForwardConfig kC = Shape::kConfig;
  using Base = Producer<Shape>;
  using S = Shared<Shape>;
  using Base::a_, Base::s_, Base::k_, Base::v_, Base::take_failed;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    this->prepare();
    offer();
    for (;;) {
      const Work& work = s_.work[(offers_ - 1) % kSlots];
      if (work.tile >= 0) {
        load(work);
      } else if (!offer_again()) {
        return;
      }
    }
  }

 private:
  // V lags behind K by one block, as its use does.
  __device__ __forceinline__ void load(const Work& work) {
    const int head_kv = work.head / a_.p.group, batch_at = work.batch_at;
    int row = work.kv_row + (work.end - 1) * kC.tile_kv, left = work.end - work.begin;
    const auto load_keys = [&](int at) {
      this->template load_block<typename S::TileK>(k_, s_.k[k_.stage()], a_.k,
                                                   {0, at, head_kv, batch_at});
    };
    load_keys(row);
    // The place of the tile before is free by the time these are asked for.
    const int offer_at = left - 1;
#pragma unroll 1
    do {
      --left;
      if (left > 0) load_keys(row - kC.tile_kv);
      this->template load_block<typename S::TileV>(v_, s_.v[v_.stage()], a_.v,
                                                   {0, row, head_kv, batch_at});
      row -= kC.tile_kv;
      if (left == offer_at) offer();
    } while (left > 0);
  }

  // Tells the consumers of the next tile: one that has to be done again, or a new one.
  __device__ __forceinline__ void offer() {
    const int slot = offers_ % kSlots;
    wait_for_slot(slot);
    Work& work = s_.work[slot];
    if (!take_failed(slot, work) && !this->claim(work)) work.tile = kPerhaps;
    // This thread's wait is that of all: the others touch memory after what it loads.
    if (offers_ == 0) ptx::wait_for_earlier_kernels();
    publish(slot);
  }

  // After the last new tile, when it is over: whether it has to be done again.
  __device__ __forceinline__ bool offer_again() {
    const int slot = offers_ % kSlots;
    wait_for_slot(slot);
    const bool again = take_failed(slot, s_.work[slot]);
    if (!again) s_.work[slot].tile = kNoTile;
    publish(slot);
    return again;
  }

  __device__ __forceinline__ void wait_for_slot(int slot) {
    Base::wait_for_slot(slot, (offers_ / kSlots & 1) ^ 1);
  }

  __device__ __forceinline__ void publish(int slot) {
    ++offers_;
    ptx::mbarrier_arrive(ptx::shared_address(&s_.work_ring.full[slot]));
    if (s_.work[slot].tile >= 0) this->load_queries(s_.work[slot], queries_++);
  }

  int offers_ = 0;   // of work, to the consumers
  int queries_ = 0;  // tiles whose queries were asked for
};

}  // namespace fovea::cuda::hopper
