// Where Q and the two stages of K and V lie in a block's shared memory, and how they get there.
#pragma once

#include "backend/cuda/portable/forward/config.h"
#include "backend/cuda/portable/forward/place.cuh"
#include "backend/cuda/portable/loads.cuh"
#include "prim/cuda/ptx/grid_dependency.cuh"

namespace fovea::cuda {

template <typename Shape>
class ForwardStages {
  using T = typename Shape::Element;
  static constexpr ForwardConfig kC = Shape::kConfig;
  static constexpr int kTileKv = kC.tile_kv, kThreads = kC.threads();
  static constexpr bool kMask = kC.terms == Terms::kMask;
  static constexpr bool kFrugalK = kC.walks();
  static constexpr bool kFrugalV = kMask || kC.terms == Terms::kComputed || kC.walks();
  // Where warps share rows a call is over in a few microseconds, most of them spent on code that is
  // fetched for the first time: there is little of it here.
  static constexpr bool kFewRows = kC.key_warps > 1;

 public:
  using TileQ = tile::SharedTile<T, kC.tile_q(), kC.dim_qk>;
  using TileK = tile::SharedTile<T, kTileKv, kC.dim_qk, kFrugalK>;
  using TileV = tile::SharedTile<T, kTileKv, kC.dim_v, kFrugalV>;

  __device__ __forceinline__ ForwardStages(const ForwardArguments& a, uint32_t shared)
      : a_(a), s_q_(shared), s_k_(s_q_ + TileQ::kBytes), s_v_(s_k_ + 2 * TileK::kBytes) {}

  __device__ __forceinline__ uint32_t q() const { return s_q_; }
  __device__ __forceinline__ uint32_t k(int stage) const { return s_k_ + stage * TileK::kBytes; }
  __device__ __forceinline__ uint32_t v(int stage) const { return s_v_ + stage * TileV::kBytes; }
  // What lies behind them.
  __device__ __forceinline__ uint32_t end() const { return s_v_ + 2 * TileV::kBytes; }

  // The first key of the n-th tile.
  static __device__ __forceinline__ int first_key(const ForwardPlace& place, int n) {
    return place.key_begin + place.tiles.tile(n) * kTileKv;
  }

  // Of the tile that is the n-th to the last, where they follow each other to the end.
  static __device__ __forceinline__ int first_key_from_end(const ForwardPlace& place, int n) {
    return place.key_begin + (place.tiles.first + n - 1) * kTileKv;
  }

  // Waits for earlier kernels and asks for Q and the first tiles; false where there are no rows.
  __device__ __forceinline__ bool begin(ForwardPlace& place) const {
    place.keys = rows_at<const T>(a_.k, place.s, place.s.kv_row, place.head_kv);
    place.values = rows_at<const T>(a_.v, place.s, place.s.kv_row, place.head_kv);
    const bool any = place.rows > 0 && place.count > 0;
    if (kFewRows && any && a_.whole_rows && place.span.one_head) {
      begin_whole(place);
      return true;
    }
    ptx::wait_for_earlier_kernels();
    if (place.rows <= 0) return false;
    load_queries<T, TileQ, kThreads, kFewRows || kC.short_turns()>(
        s_q_, a_.q, place, a_.p.group, place.span, place.rows, a_.p.dim_qk, a_.vector_qk,
        whole_fragments<TileQ>(place.rows));
    load_first(place);
    return true;
  }

  // What this thread has brought of Q, once it is there.
  __device__ __forceinline__ void round_queries() const { LoaderQ::round(s_q_); }

  __device__ __forceinline__ void load_first(const ForwardPlace& place) const {
#pragma unroll 1
    for (int n = 0; n < 2; ++n) {
      if (n < place.count) load(place, n, first_key(place, n));
      ptx::cp_async_commit();
    }
  }

  // Keys from `first` on.
  __device__ __forceinline__ void load(const ForwardPlace& place, int stage, int first) const {
    const int left = place.key_end - first;
    // Of few rows the last tile takes the same way as the others: it is one of few, and a way of
    // its own would be code to fetch.
    if (a_.whole_rows && (kFewRows || left >= kTileKv)) {
      load_whole(place, stage, first);
      return;
    }
    constexpr int kStep = kMask || kC.terms == Terms::kBias ? kC.chunk_kv : 32;
    const int filled = whole_fragments<TileK, kStep>(left);  // no more is looked at
    LoaderK::fill(k(stage), keys(place) + first * a_.k.row, a_.k.row, left, a_.p.dim_qk,
                  a_.vector_qk, filled);
    LoaderV::fill(v(stage), values(place) + first * a_.v.row, a_.v.row, left, a_.p.dim_v,
                  a_.vector_v, filled);
  }

  // Keys from `first` on, all there and of whole rows. Where a thread's share lies is worked out
  // anew: there is no register to keep it in.
  __device__ __forceinline__ void load_plain(const ForwardPlace& place, int stage,
                                             int first) const {
    uint32_t thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    LoaderK::template fill_share<false>(
        k(stage), LoaderK::share(keys(place), a_.k.row, first, 0, thread), a_.k.row);
    LoaderV::template fill_share<false>(
        v(stage), LoaderV::share(values(place), a_.v.row, first, 0, thread), a_.v.row);
  }

 private:
  using LoaderQ = tile::TileLoader<T, TileQ, kThreads>;
  static constexpr tile::RowOrder kOrder =
      kMask ? tile::RowOrder::kRunsOfEight : tile::RowOrder::kPlain;
  using LoaderK = tile::TileLoader<T, TileK, kThreads, kOrder>;
  using LoaderV = tile::TileLoader<T, TileV, kThreads, kOrder>;

  static __device__ __forceinline__ const T* keys(const ForwardPlace& place) {
    return static_cast<const T*>(place.keys);
  }
  static __device__ __forceinline__ const T* values(const ForwardPlace& place) {
    return static_cast<const T*>(place.values);
  }

  __device__ __forceinline__ void load_whole(const ForwardPlace& place, int stage,
                                             int first) const {
    const int end = place.key_end;
    LoaderK::template fill_whole<kFewRows>(k(stage), keys(place), a_.k.row, first, end);
    LoaderV::template fill_whole<kFewRows>(v(stage), values(place), a_.v.row, first, end);
  }

  // The same as begin() for whole rows of one head: while earlier kernels end it is worked out what
  // each thread brings, so that nothing but the copies is left to do afterwards.
  __device__ __forceinline__ void begin_whole(const ForwardPlace& place) const {
    const Row first_row = place.span.first;
    const int first = first_key(place, 0), end = place.key_end;
    const auto q = LoaderQ::share(rows_at<const T>(a_.q, place.s, place.s.q_row + first_row.i,
                                                   place.head_kv * a_.p.group + first_row.head),
                                  a_.q.row, 0, place.rows);
    const auto k = LoaderK::share(keys(place), a_.k.row, first, end);
    const auto v = LoaderV::share(values(place), a_.v.row, first, end);
    ptx::wait_for_earlier_kernels_with(q.source, k.source, v.source);
    LoaderK::template fill_share<true>(s_k_, k, a_.k.row);
    LoaderV::template fill_share<true>(s_v_, v, a_.v.row);
    LoaderQ::template fill_share<true>(s_q_, q, a_.q.row);
    ptx::cp_async_commit();
    if (place.count > 1) load_whole(place, 1, first_key(place, 1));
    ptx::cp_async_commit();
  }

  const ForwardArguments& a_;
  const uint32_t s_q_, s_k_, s_v_;
};

}  // namespace fovea::cuda
