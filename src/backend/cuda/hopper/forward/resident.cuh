// Short problems: about one tile of rows to an SM, and so few keys that shared memory holds all
// that a tile sees. Such a call is over in a few microseconds, most of which a block spends on code
// that no cache holds yet, and on waiting for other threads: here each finds the tile for itself,
// K and V are asked for at once, and there is one way through a block of keys, with a running
// maximum.
#pragma once

#include "backend/cuda/hopper/forward/products.cuh"
#include "backend/cuda/hopper/forward/softmax.cuh"
#include "backend/cuda/hopper/forward/store.cuh"
#include "prim/cuda/ptx/grid_dependency.cuh"
#include "prim/cuda/ptx/tma.cuh"

namespace fovea::cuda::hopper {

template <typename Shape>
struct ResidentShared {
  static constexpr ForwardConfig kC = Shape::kConfig;
  using TileQ = tile::SwizzledTile<kRowsOfWarpgroup, kC.dim_qk>;  // of a warpgroup
  using TileK = tile::SwizzledTile<kC.tile_kv, kC.dim_qk>;
  using TileV = tile::SwizzledTile<kC.tile_kv, kC.dim_v>;
  using TileOut = typename Shared<Shape>::TileOut;

  alignas(tile::kTileAlignment) unsigned char q[kC.warpgroups][TileQ::kBytes];
  unsigned char out[kC.warpgroups][TileOut::kBytes];
  unsigned char k[kC.stages][TileK::kBytes];
  unsigned char v[kC.stages][TileV::kBytes];
  uint64_t q_full[kC.warpgroups], k_full[kC.stages], v_full[kC.stages];

  __device__ __forceinline__ void init() {
    for (uint64_t& barrier : q_full) ptx::mbarrier_init(ptx::shared_address(&barrier), 1);
    for (uint64_t& barrier : k_full) ptx::mbarrier_init(ptx::shared_address(&barrier), 1);
    for (uint64_t& barrier : v_full) ptx::mbarrier_init(ptx::shared_address(&barrier), 1);
    ptx::mbarrier_init_fence();
  }
};

template <typename Shape>
class ResidentTile {
  using T = typename Shape::Element;
  static constexpr ForwardConfig kC = Shape::kConfig;
  static constexpr int kTileKv = kC.tile_kv;
  static_assert(kC.warpgroups == 2);  // one asks for keys, one for values
  using S = ResidentShared<Shape>;
  using TileQ = typename S::TileQ;
  using TileK = typename S::TileK;
  using TileV = typename S::TileV;

 public:
  __device__ __forceinline__ ResidentTile(const ForwardArguments& a, S& s, int warpgroup)
      : a_(a), s_(s), warpgroup_(warpgroup) {}

  __device__ __forceinline__ void run() {
    if (thread() == 0) {
      if (warpgroup_ == 0) s_.init();
      ptx::tma_prefetch_map(a_.q);
      ptx::tma_prefetch_map(warpgroup_ == 0 ? a_.k : a_.v);
      ptx::tma_prefetch_map(a_.out);
    }
    if (a_.p.lengths_are_read()) ptx::wait_for_earlier_kernels();
    const Work work = place();
    const int row = work.row + warpgroup_ * kRowsOfWarpgroup;
    const bool has_rows = row < work.q_len;
    __syncthreads();
    if (thread() == 0) {
      ptx::wait_for_earlier_kernels();
      load(work, has_rows);
    }
    const RowsSeen seen(a_.p, work, row);
    bool clean = false;
    for (;;) {
      if (has_rows) add_blocks(work, seen);
      const bool failed = has_rows && softmax_.needed_care(out_) != kBold;
      if (clean || __syncthreads_or(failed) == 0) break;
      clean_values(work);
      clean = true;
    }
    const Epilogue<Shape> epilogue(a_, s_.out[warpgroup_], work, warpgroup_);
    if (clean) {
      epilogue.store_clean(softmax_, out_, work, seen);
    } else {
      epilogue.store(softmax_, out_);
    }
    if (thread() == 0) ptx::tma_wait_stores();
  }

 private:
  static __device__ __forceinline__ int thread() { return threadIdx.x % kWarpgroup; }

  __device__ __forceinline__ Work place() const {
    Work work{};
    work.care = a_.care;
    work.b = static_cast<int>(blockIdx.z);
    work.head = static_cast<int>(blockIdx.y);
    work.row = static_cast<int>(blockIdx.x) * kC.tile_q();
    const Sequence s = sequence_at(a_.p, work.b);
    work.q_len = s.q_len;
    work.kv_len = s.kv_len;
    work.q_row = static_cast<int>(s.q_row);
    work.kv_row = static_cast<int>(s.kv_row);
    work.batch_at = s.batch_at;
    const int last = min(work.row + kC.tile_q(), s.q_len) - 1;
    const int begin = sight_of(a_.p, s, work.row).begin, end = sight_of(a_.p, s, last).end;
    work.begin = begin / kTileKv;
    work.end = last >= work.row && end > begin ? (end + kTileKv - 1) / kTileKv : work.begin;
    return work;
  }

  // By one thread of each warpgroup: its queries, and the keys or the values of all, the last
  // first.
  __device__ __forceinline__ void load(const Work& work, bool has_rows) const {
    if (work.end == work.begin) return;
    if (has_rows) {
      const int row = work.q_row + work.row + warpgroup_ * kRowsOfWarpgroup;
      load_tile<TileQ>(s_.q[warpgroup_], a_.q, {0, row, work.head, work.batch_at},
                       s_.q_full[warpgroup_]);
    }
    const int head_kv = a_.p.group == 1 ? work.head : work.head / a_.p.group;
#pragma unroll 1
    for (int n = work.end - 1; n >= work.begin; --n) {
      const int slot = n - work.begin;
      const ptx::BoxAt at = {0, work.kv_row + n * kTileKv, head_kv, work.batch_at};
      if (warpgroup_ == 0) {
        load_tile<TileK>(s_.k[slot], a_.k, at, s_.k_full[slot]);
      } else {
        load_tile<TileV>(s_.v[slot], a_.v, at, s_.v_full[slot]);
      }
    }
  }

  template <typename Tile>
  static __device__ __forceinline__ void load_tile(unsigned char* to, const CUtensorMap& map,
                                                   ptx::BoxAt at, uint64_t& barrier) {
    const uint32_t full = ptx::shared_address(&barrier);
    ptx::mbarrier_arrive_expect(full, Tile::kBytes);
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      at.x = panel * tile::kPanelColumns;
      ptx::tma_load(ptx::shared_address(to) + panel * Tile::kPanelBytes, map, at, full);
    }
  }
  static __device__ __forceinline__ void wait(const uint64_t& barrier) {
    ptx::mbarrier_wait(ptx::shared_address(&barrier), 0);
  }

  // The next block's scores are asked for with the values of this one.
  __device__ __forceinline__ void add_blocks(const Work& work, const RowsSeen& seen) {
    softmax_.start();
#pragma unroll
    for (int i = 0; i < kC.dim_v / 2; ++i) out_[i] = 0;
    const int end = max(min(work.end, (seen.any_end() + kTileKv - 1) / kTileKv), work.begin);
    const int blocks = end - work.begin;
    if (blocks > 0) {
      wait(s_.q_full[warpgroup_]);
      wait(s_.k_full[blocks - 1]);
      ptx::wgmma_fence();
      ptx::pin(scores_);
      issue_scores(blocks - 1);
      ptx::wgmma_wait<0>();
      ptx::pin(scores_);
#pragma unroll 1
      for (int slot = blocks - 1; slot >= 0; --slot) {
        seen.hide(scores_, (work.begin + slot) * kTileKv, kTileKv);
        if (softmax_.look(scores_, a_.to_log2)) softmax_.rescale(out_);
        softmax_.weigh(scores_, a_.to_log2);
        pack_weights<T>(weights_, scores_);
        // After the last one: some scores again, which mean nothing.
        const int next = max(slot - 1, 0);
        wait(s_.v_full[slot]);
        wait(s_.k_full[next]);
        ptx::wgmma_fence();
        ptx::pin(out_);
        ptx::pin(scores_);
        issue_values(slot);
        issue_scores(next);
        ptx::wgmma_wait<0>();
        ptx::pin(out_);
        ptx::pin(scores_);
      }
    }
    softmax_.finish();
  }

  __device__ __forceinline__ void issue_scores(int slot) {
    hopper::issue_scores<T, TileQ, TileK>(scores_,
                                          tile::matrix_descriptor(ptx::shared_address(s_.q), 16) +
                                              tile::descriptor_step(warpgroup_ * TileQ::kBytes),
                                          tile::matrix_descriptor(ptx::shared_address(s_.k), 16) +
                                              tile::descriptor_step(slot * TileK::kBytes));
  }
  __device__ __forceinline__ void issue_values(int slot) {
    hopper::issue_values<T>(out_, weights_,
                            tile::matrix_descriptor(ptx::shared_address(s_.v), TileV::kPanelBytes) +
                                tile::descriptor_step(slot * TileV::kBytes));
  }

  // Frees all values of what is not finite.
  __device__ __forceinline__ void clean_values(const Work& work) const {
    const uint32_t s_v = ptx::shared_address(s_.v);
    const int bytes = (work.end - work.begin) * TileV::kBytes;
#pragma unroll 1
    for (int x = static_cast<int>(threadIdx.x) * 16; x < bytes; x += kC.threads() * 16) {
      make_finite<T>(s_v + x);
    }
    ptx::fence_async_shared();
    __syncthreads();
  }

  const ForwardArguments& a_;
  S& s_;
  const int warpgroup_;
  float scores_[kTileKv / 2], out_[kC.dim_v / 2];
  uint32_t weights_[kTileKv / 4];
  Softmax softmax_;
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), 1)
    resident_kernel(const __grid_constant__ ForwardArguments a) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<ResidentShared<Shape>*>(memory);
  ptx::let_next_kernel_begin();
  // The same for all lanes, said so that addresses can be in uniform registers.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  ResidentTile<Shape>(a, shared, warpgroup).run();
}

}  // namespace fovea::cuda::hopper
