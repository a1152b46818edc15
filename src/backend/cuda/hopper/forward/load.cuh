// The producer: one thread that decides which tile is next, tells the consumers, and asks TMA for
// its Q, K and V.
#pragma once

#include "backend/cuda/common/sequence.cuh"
#include "backend/cuda/hopper/forward/arguments.h"
#include "backend/cuda/hopper/forward/shared.cuh"
#include "prim/cuda/ptx/grid_dependency.cuh"
#include "prim/cuda/ptx/tma.cuh"

namespace fovea::cuda::hopper {

template <typename Shape>
class Producer {
  static constexpr ForwardConfig kC = Shape::kConfig;
  using S = Shared<Shape>;

 public:
  __device__ __forceinline__ Producer(const ForwardArguments& a, S& s)
      : a_(a), s_(s), k_(s.k_ring), v_(s.v_ring) {}

  __device__ __forceinline__ void run() {
    prepare();
    for (int count = 0;; ++count) {
      const int slot = count % kSlots;
      const bool any = find(count, s_.work[slot]);
      // This thread's wait is that of all: the others touch memory after what it loads.
      if (count == 0) ptx::wait_for_earlier_kernels();
      if (!any) s_.work[slot].tile = kNoTile;
      ptx::mbarrier_arrive(ptx::shared_address(&s_.work_ring.full[slot]));
      if (!any) return;
      load(s_.work[slot], count);
    }
  }

 protected:
  __device__ __forceinline__ void prepare() const {
    ptx::tma_prefetch_map(a_.q);
    ptx::tma_prefetch_map(a_.k);
    ptx::tma_prefetch_map(a_.v);
    ptx::tma_prefetch_map(a_.out);
    if (a_.p.lengths_are_read()) ptx::wait_for_earlier_kernels();
  }

  // V lags behind K by one block, as its use does.
  __device__ __forceinline__ void load(const Work& work, int count) {
    const int head_kv = work.head / a_.p.group, batch_at = work.batch_at;
    const int last = work.kv_row + (work.end - 1) * kC.tile_kv;
    int row = last;
#pragma unroll 1
    for (int left = work.end - work.begin; left > 0; --left) {
      load_block<typename S::TileK>(k_, s_.k[k_.stage()], a_.k, {0, row, head_kv, batch_at});
      if (row == last) {
        load_queries(work, count);
      } else {
        load_block<typename S::TileV>(v_, s_.v[v_.stage()], a_.v,
                                      {0, row + kC.tile_kv, head_kv, batch_at});
      }
      row -= kC.tile_kv;
    }
    if (row != last) {
      load_block<typename S::TileV>(v_, s_.v[v_.stage()], a_.v,
                                    {0, row + kC.tile_kv, head_kv, batch_at});
    } else {
      load_queries(work, count);  // that the count of the ring stays the count of tiles
    }
  }

  template <typename Tile, typename Ring>
  __device__ __forceinline__ void load_block(Ring& ring, unsigned char* to, const CUtensorMap& map,
                                             ptx::BoxAt at) {
    ring.acquire(Tile::kBytes);
#pragma unroll 1
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      at.x = panel * tile::kPanelColumns;
      ptx::tma_load(ptx::shared_address(to) + panel * Tile::kPanelBytes, map, at, ring.full());
    }
    ring.advance();
  }

  // Each warpgroup has its own ring, for one may be a tile ahead of another.
  __device__ __forceinline__ void load_queries(const Work& work, int count) {
    using Tile = typename S::TileQ;
    constexpr int kStages = kC.q_stages();
    const int slot = count % kStages, parity = count / kStages & 1;
    ptx::BoxAt at = {0, work.q_row + work.row, work.head, work.batch_at};
#pragma unroll 1
    for (int w = 0; w < kC.warpgroups; ++w) {
      const uint32_t full = ptx::shared_address(&s_.q_ring[w].full[slot]);
      ptx::mbarrier_wait(ptx::shared_address(&s_.q_ring[w].empty[slot]), parity ^ 1);
      ptx::mbarrier_arrive_expect(full, Tile::kBytes);
#pragma unroll 1
      for (int panel = 0; panel < Tile::kPanels; ++panel) {
        at.x = panel * tile::kPanelColumns;
        ptx::tma_load(ptx::shared_address(s_.q[slot][w]) + panel * Tile::kPanelBytes, a_.q, at,
                      full);
      }
      at.y += kRowsOfWarpgroup;
    }
  }

  // The tile of index `count` in this block: one that has to be done again, or a new one.
  __device__ __forceinline__ bool find(int count, Work& work) {
    const int slot = count % kSlots;
    wait_for_slot(slot, (count / kSlots & 1) ^ 1);
    if (take_failed(slot, work) || claim(work)) return true;
    if (count == 0) return false;
    // Only the tile before this one is still being worked on.
    const int before = count - 1;
    wait_for_slot(before % kSlots, before / kSlots & 1);
    return take_failed(before % kSlots, work);
  }

  __device__ __forceinline__ void wait_for_slot(int slot, int parity) {
    ptx::mbarrier_wait(ptx::shared_address(&s_.work_ring.empty[slot]), parity);
  }

  __device__ __forceinline__ bool take_failed(int slot, Work& work) {
    const int care = static_cast<volatile int&>(s_.failed[slot]);
    if (care == kBold) return false;
    static_cast<volatile int&>(s_.failed[slot]) = kBold;
    copy(work, s_.work[slot]);
    work.care |= care;
    return true;
  }

  // Word by word, for want of registers.
  static __device__ __forceinline__ void copy(Work& to, const Work& from) {
#pragma unroll 1
    for (int i = 0; i < static_cast<int>(sizeof(Work) / sizeof(int)); ++i) {
      reinterpret_cast<int*>(&to)[i] = reinterpret_cast<const int*>(&from)[i];
    }
  }

  // The next tile that has rows. It is claimed as late as can be: the loads of the one before have
  // all been asked for, so its computation is about to end.
  __device__ __forceinline__ bool claim(Work& work) {
    for (;;) {
      const int tile = next();
      if (tile >= a_.schedule.tiles) return false;
      if (place(tile, work)) return true;
    }
  }

  // With a ticket, whoever is first takes the next one. Without, rounds go to and fro over the
  // blocks, so that who had a long tile in one has a short one in the next.
  __device__ __forceinline__ int next() {
    const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    const int round = round_++;
    if (round == 0) return block;
    if (a_.schedule.ticket != nullptr) return blocks + atomicAdd(a_.schedule.ticket, 1);
    return round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
  }

  // Rows of a sequence's first tile that are none of its own.
  static __device__ __forceinline__ int rows_before(int q_len) {
    if (!kC.fills_from_end()) return 0;
    const int tiles = (q_len + kC.tile_q() - 1) / kC.tile_q();
    return (tiles * kC.tile_q() - q_len) / kRowsOfWarpgroup * kRowsOfWarpgroup;
  }

  __device__ __forceinline__ bool place(int tile, Work& work) const {
    const Schedule& schedule = a_.schedule;
    work.tile = tile;
    work.part = 0;
    int first_key = 0, last_key = a_.p.kv_len;
    if constexpr (kC.takes_parts()) {
      const int whole = tile / schedule.parts;
      work.part = tile - whole * schedule.parts;
      first_key = work.part * schedule.part_keys;
      last_key = first_key + schedule.part_keys;
      tile = whole;
    }
    const int section_tiles = schedule.section_heads * schedule.row_tiles;
    const int section = tile / section_tiles;
    const int at = tile - section * section_tiles, first_head = section * schedule.section_heads;
    const int heads = min(schedule.section_heads, schedule.heads - first_head);
    const int back = at / heads;
    const int head = first_head + at - back * heads;
    work.care = a_.care;
    work.b = head / a_.p.head_q;
    work.head = head - work.b * a_.p.head_q;
    const Sequence s = sequence_at(a_.p, work.b);
    work.row = (schedule.row_tiles - 1 - back) * kC.tile_q() - rows_before(s.q_len);
    if (work.row >= s.q_len) return false;
    work.q_len = s.q_len;
    work.kv_len = s.kv_len;
    work.q_row = static_cast<int>(s.q_row);
    work.kv_row = static_cast<int>(s.kv_row);
    work.batch_at = s.batch_at;
    const int first = max(work.row, 0), last = min(work.row + kC.tile_q(), s.q_len) - 1;
    const int begin = max(sight_of(a_.p, s, first).begin, first_key);
    const int end = min(sight_of(a_.p, s, last).end, last_key);
    work.begin = begin / kC.tile_kv;
    work.end = end > begin ? (end + kC.tile_kv - 1) / kC.tile_kv : work.begin;
    if constexpr (kC.joins_tiles()) {
      // One all the same: the part's first, of which no row sees anything.
      if (end <= begin) {
        work.begin = first_key / kC.tile_kv;
        work.end = work.begin + 1;
      }
    }
    return true;
  }

  const ForwardArguments& a_;
  S& s_;
  tile::Ring<kC.stages> k_, v_;
  int round_ = 0;
};

}  // namespace fovea::cuda::hopper
