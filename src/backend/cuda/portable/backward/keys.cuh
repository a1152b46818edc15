// dK and dV, and dQ in the same pass: a block holds a tile of keys of one KV head and walks over
// the query rows of its group that see them, Q and dO coming through two stages of shared memory.
// Fragments have keys for rows and queries for columns, so that weights are at once the operand of
// the sums. Gradients of scores go through shared memory to the product that is dQ, which is added
// to sums in the workspace.
#pragma once

#include "backend/cuda/portable/backward/key_elements.cuh"
#include "backend/cuda/portable/backward/key_rows.cuh"
#include "backend/cuda/portable/backward/turns.cuh"
#include "prim/cuda/ptx/barrier.cuh"
#include "prim/cuda/ptx/grid_dependency.cuh"
#include "prim/cuda/ptx/registers.cuh"
#include "prim/cuda/tile/products.cuh"
#include "prim/cuda/tile/staged_rows.cuh"

namespace fovea::cuda {

enum class KeySums { kBoth, kDk, kDv, kAll };  // kAll: dq too

template <typename Shape, KeySums kSums>
constexpr BackwardConfig kKeyConfig = kSums == KeySums::kAll ? Shape::kOnePass : Shape::kConfig;

template <typename Shape, KeySums kSums>
class KeyBlock {
  using T = typename Shape::Element;
  static constexpr BackwardConfig kC = kKeyConfig<Shape, kSums>;
  static constexpr int kM = kC.key_m_tiles, kTileKv = kC.key_tile(), kTileQ = kC.key_tile_q;
  static constexpr int kThreads = kC.key_threads();
  static constexpr bool kAnyTerms = kC.terms == Terms::kAny;
  static constexpr bool kWantDk = kSums != KeySums::kDv, kWantDv = kSums != KeySums::kDk;
  static constexpr bool kWantDq = kSums == KeySums::kAll;
  // What asks whether there are turns is not left to the kernels that have to be fast.
  static constexpr bool kInTurn = kWantDq && kAnyTerms;
  // Warps that share their keys: each takes its share of the queries for the scores, which pass
  // through shared memory, and its share of the columns for the sums.
  static constexpr int kShare = kC.query_warps;
  static constexpr int kMaskedChunk = kC.masked_chunk, kChunk = kWantDq ? kC.chunk : kMaskedChunk;
  // Warps over the rows of dq, and over its columns.
  static constexpr int kDqWarpsM = kC.dq_row_warps, kDqWarpsN = kC.key_warps / kDqWarpsM;
  static constexpr int kDqM = kTileQ / 16 / kDqWarpsM, kDqN = kC.dim_qk / 8 / kDqWarpsN;
  using Steps = Ladder<kTileKv, kTileQ>;
  using Elements = KeyElements<T, kM, kTileQ, kC.terms>;
  static constexpr bool kReads = kReadsTerm<kC.terms>, kMask = kC.terms == Terms::kMask;
  static constexpr tile::RowOrder kOrder = kKeyOrder<kC.terms>;
  static constexpr bool kFrugal = kC.one_term();  // of registers
  using TileK = tile::SharedTile<T, kTileKv, kC.dim_qk, kFrugal>;
  using TileV = tile::SharedTile<T, kTileKv, kC.dim_v, kFrugal>;
  using TileQ = tile::SharedTile<T, kTileQ, kC.dim_qk, kFrugal>;
  using TileDout = tile::SharedTile<T, kTileQ, kC.dim_v, kFrugal>;
  using TileDs = tile::SharedTile<T, kTileKv, kTileQ, kFrugal>;  // gradients of scores, a key a row
  static_assert(kShare == 1 || (kWantDq && kTileQ == kShare * kC.chunk));

 public:
  __device__ __forceinline__ KeyBlock(const BackwardArguments& a, RungPlace& place,
                                      unsigned char* memory)
      : a_(a), place_(place), rows_(a, place, reinterpret_cast<float*>(memory)) {
    s_k_ = ptx::shared_address(memory) + BackwardConfig::kStages * kTileQ * kC.row_stats() * 4;
    s_v_ = s_k_ + TileK::kBytes;
    s_q_ = s_v_ + TileV::kBytes;
    s_dout_ = s_q_ + 2 * TileQ::kBytes;
    s_ds_ = s_dout_ + 2 * TileDout::kBytes;
    s_weights_ = s_ds_ + 2 * TileDs::kBytes;
  }

  __device__ __forceinline__ void run() {
    const Problem& p = a_.p;
    if (threadIdx.x == 0) {
      const int block = kInTurn ? block_in_turn<kTileKv>(a_) : blockIdx.x;
      find_rung(0, Steps::find_place(a_, block, place_));
    }
    __syncthreads();
    if (place_.key_begin >= stored_keys()) return;
    load_keys<T, TileK, kThreads, kOrder>(s_k_, a_.k, place_, place_.key_begin, place_.s.kv_len,
                                          p.dim_qk, a_.vector_k);
    load_keys<T, TileV, kThreads, kOrder>(s_v_, a_.v, place_, place_.key_begin, place_.s.kv_len,
                                          p.dim_v, a_.vector_v);
    // What the loop does not hold in registers is left to the sums. A turn of it before the first
    // rung brings that one's rows, and one after the last adds to dq what that one left: code is in
    // one place each.
    if constexpr (kWantDk) tile::clear(dk_);
    if constexpr (kWantDv) tile::clear(dv_);
#pragma unroll 1
    for (int n = -1;; ++n) {
      if (n >= 0) {
        ptx::cp_async_wait<0>();
        if (n == 0) round_keys();
        __syncthreads();
      }
      if (there_is(n + 1)) load_rows((n + 1) % 2, place_.rungs[(n + 1) % 4]);
      ptx::cp_async_commit();
      if (threadIdx.x == 0) find_rung(n + 2, place_.rungs[(n + 1) % 4].tile + 1);
      if (n < 0) continue;
      if constexpr (kC.keys_in_registers) {
        if (n == 0) {
          tile::rows_of_tile<TileK>(k_, s_k_, first_key());
          tile::rows_of_tile<TileV>(v_, s_v_, first_key());
        }
      }
      if constexpr (kMask) {
        if (n == 0) look_at_keys();
      }
      bool ends = !there_is(n);
      if constexpr (kShare > 1) {
        if (!ends) step(n);
      }
      add_dq_before(n);
      if constexpr (kReads) ends = !there_is(n);  // for want of a register
      if (ends) break;
      if constexpr (kShare == 1) step(n);
    }
    __syncthreads();
    if (kWantDq && a_.row_parts > 1) {
      add_sums();
    } else {
      store();
    }
  }

 private:
  // Anew: worked out where it is needed, for want of a register to keep it in.
  template <bool kAnew = kReads>
  static __device__ __forceinline__ int warp() {
    return static_cast<int>((kAnew ? ptx::renewed(threadIdx.x) : threadIdx.x) / 32);
  }
  static __device__ __forceinline__ int share() { return warp() % kShare; }
  // This warp's first key, counted from the block's.
  static __device__ __forceinline__ int first_key() { return warp() / kShare * kM * 16; }

  // Dense rows past a key length exist and get zeros; packed ones belong to the next sequence.
  __device__ __forceinline__ int stored_keys() const {
    return a_.p.cu_q != nullptr ? place_.s.kv_len : a_.p.kv_len;
  }
  // The n-th, from `tile` on; for one thread to find.
  __device__ __forceinline__ void find_rung(int n, int tile) const {
    Rung& rung = place_.rungs[n % 4];
    rung = Steps::rung_from(a_.p, place_, tile);
    if (kInTurn && a_.turns != nullptr) rung.turn = turn_of<kTileKv, kTileQ>(a_, place_, rung.tile);
  }
  __device__ __forceinline__ bool there_is(int n) const {
    return place_.rungs[n % 4].tile < place_.tile_end;
  }

  __device__ __forceinline__ void load_rows(int stage, const Rung& rung) {
    const int rows = a_.p.group * place_.s.q_len - rung.tile * kTileQ;
    const RowSpan span = rung.span(kTileQ);
    load_queries<T, TileQ, kThreads>(s_q_ + stage * TileQ::kBytes, a_.q, place_, a_.p.group, span,
                                     rows, a_.p.dim_qk, a_.vector_q);
    load_queries<T, TileDout, kThreads>(s_dout_ + stage * TileDout::kBytes, a_.dout, place_,
                                        a_.p.group, span, rows, a_.p.dim_v, a_.vector_dout);
    rows_.load(stage, rung, span, rows);
  }

  __device__ __forceinline__ void round_keys() const {
    tile::TileLoader<T, TileK, kThreads>::round(s_k_);
    tile::TileLoader<T, TileV, kThreads>::round(s_v_);
  }

  __device__ __forceinline__ void step(int n) {
    if constexpr (kShare > 1) {
      const int chunk = share() * kChunk;
      if (first_key() >= place_.rungs[n % 4].keys) {  // so say the warps that share the keys
        store_nothing(s_ds_ + ds_stage(n), chunk);
        ptx::barrier_sync(1 + warp() / kShare, 32 * kShare);  // all pass the same barriers
        return;
      }
      const Seen seen = seen_by_warp(n, chunk);
      bool dirty = false;
      if (seen != Seen::kNone && carefully(seen, n, chunk)) {
#pragma unroll 1
        for (int part = 0; part < kChunk; part += kMaskedChunk) {
          dirty |= share_chunk<true, kMaskedChunk / 8>(n, chunk + part);
        }
      } else if (seen == Seen::kAll) {
        share_chunk<false, kChunk / 8>(n, chunk);
      } else {
        store_nothing(s_ds_ + ds_stage(n), chunk);
        store_nothing(s_weights_, chunk);
      }
      if (ptx::barrier_or(1 + warp() / kShare, 32 * kShare, dirty)) {
        add_shared_products<true>(n);
      } else {
        add_shared_products<false>(n);
      }
    } else {
#pragma unroll 1
      for (int chunk = 0; chunk < kTileQ; chunk += kChunk) {
        const Seen seen = seen_by_warp(n, chunk);
        if (kAnyTerms || (seen != Seen::kNone && carefully(seen, n, chunk))) {
#pragma unroll 1
          for (int part = 0; part < kChunk; part += kMaskedChunk) {
            add_chunk<true, kMaskedChunk / 8>(n, chunk + part);
          }
        } else if (seen == Seen::kAll) {
          add_chunk<false, kChunk / 8>(n, chunk);
        } else if constexpr (kWantDq) {
          store_nothing(s_ds_ + ds_stage(n), chunk);
        }
      }
    }
  }

  static __device__ __forceinline__ uint32_t ds_stage(int n) { return n % 2 * TileDs::kBytes; }
  __device__ __forceinline__ void store_nothing(uint32_t shared, int chunk) const {
    ptx::Fragment none[kM][kChunk / 8];
    tile::clear(none);
    tile::store_fragments<T, TileDs>(shared, first_key(), chunk, none);
  }

  enum class Seen { kNone, kSome, kAll };
  // How much of this warp's keys the rows of a chunk see.
  __device__ __forceinline__ Seen seen_by_warp(int n, int chunk) const {
    const Rung& rung = place_.rungs[n % 4];
    if (!rung.masked) return Seen::kAll;
    const int begin = place_.key_begin + first_key(), end = begin + kM * 16;
    const int prefix = min(a_.p.prefix, place_.s.kv_len);
    if (begin >= place_.s.kv_len) return Seen::kNone;
    const bool whole = rung.tile * kTileQ + chunk + kChunk <= a_.p.group * place_.s.q_len;
    if (!rung.one_head || !whole) return Seen::kSome;
    const int2* const sights = rows_.sights(n % 2);
    const int2 low = sights[chunk], high = sights[chunk + kChunk - 1];
    if ((high.y <= begin || low.x >= end) && prefix <= begin) return Seen::kNone;
    return (high.x <= begin && low.y >= end) || prefix >= end ? Seen::kAll : Seen::kSome;
  }

  // Whether a chunk takes what costs time: not all of it is seen, its term has to be read one by
  // one, or something that a mask may hide is not finite.
  __device__ __forceinline__ bool carefully(Seen seen, int n, int chunk) const {
    if (seen == Seen::kSome) return true;
    if constexpr (kMask) {
      const Elements elements(a_, place_, rows_.stats(n % 2));
      if (place_.dirty_keys || !elements.finite_rows(chunk)) return true;
    }
    return kReads && !a_.p.term_runs;
  }

  // Weights and gradients of scores; whether a row of q or dout is not finite.
  // kMasked is known at compile time: what it costs would otherwise be paid by all.
  template <bool kMasked, int kN>
  __device__ __forceinline__ bool weigh(ptx::Fragment (&weights)[kM][kN],
                                        ptx::Fragment (&scores)[kM][kN], int n, int chunk) const {
    const int stage = n % 2;
    const uint32_t s_q = s_q_ + stage * TileQ::kBytes, s_dout = s_dout_ + stage * TileDout::kBytes;
    const Elements elements(a_, place_, rows_.stats(stage));
    uint32_t hidden = 0;
    if constexpr (kReads) {
      auto terms = terms_of<kN>(stage, chunk);
      const int key = place_.key_begin + first_key();
      if constexpr (kMasked) {
        hidden = terms.start_each(weights, key, place_.s.kv_len);
      } else {
        terms.fetch(key);
      }
      elements.start_from_delta(scores, chunk);
      tile::add_dot_rows<T, TileV, TileDout>(scores, s_v_, first_key(), s_dout, chunk);
      if constexpr (!kMasked) terms.start(weights);
      tile::add_dot_rows<T, TileK, TileQ>(weights, s_k_, first_key(), s_q, chunk);
    } else if constexpr (kC.keys_in_registers) {
      elements.start_from_delta(scores, chunk);
      tile::dot_fragments<T, TileQ>(weights, k_, s_q, chunk);
      tile::add_dot_fragments<T, TileDout>(scores, v_, s_dout, chunk);
    } else {
      elements.start_from_delta(scores, chunk);
      tile::dot_rows<T, TileK, TileQ>(weights, s_k_, first_key(), s_q, chunk);
      tile::add_dot_rows<T, TileV, TileDout>(scores, s_v_, first_key(), s_dout, chunk);
    }
    // Such rows show in every product; they must not meet the zero weights of keys that they do not
    // see.
    const bool dirty = kMasked && Elements::any_nonfinite(weights, scores);
    elements.template weigh<kMasked>(weights, scores, place_.rungs[n % 4], first_key(), chunk,
                                     dirty, hidden);
    return dirty;
  }

  template <int kN>
  __device__ __forceinline__ KeyTerms<T, kC.terms, kN> terms_of(int stage, int chunk) const {
    return KeyTerms<T, kC.terms, kN>(a_.p, rows_.terms(stage, chunk));
  }
  template <bool kMasked, int kN>
  __device__ __forceinline__ void store_dbias(const ptx::Fragment (&scores)[kM][kN], int n,
                                              int chunk) const {
    if (!a_.dbias_in_pass) return;
    const int key = place_.key_begin + first_key();
    const auto terms = terms_of<kN>(n % 2, chunk);
    if constexpr (kMasked) {
      const int first = place_.rungs[n % 4].tile * kTileQ + chunk;
      terms.store_each(scores, key, place_.s.kv_len, a_.p.group * place_.s.q_len - first,
                       a_.dbias_shift);
    } else {
      terms.store(scores, key, a_.dbias_shift);
    }
  }

  template <bool kMasked, int kN>
  __device__ __forceinline__ void add_chunk(int n, int chunk) {
    ptx::Fragment weights[kM][kN], scores[kM][kN];
    const bool dirty = weigh<kMasked>(weights, scores, n, chunk);
    const uint32_t s_q = s_q_ + n % 2 * TileQ::kBytes, s_dout = s_dout_ + n % 2 * TileDout::kBytes;
    if (dirty) {
      add_products(weights, scores, s_q, s_dout, chunk, true);
    } else {
      add_products(weights, scores, s_q, s_dout, chunk, false);
    }
    // Last, for no load of a fragment is moved before a store.
    if constexpr (kWantDq) {
      tile::store_fragments<T, TileDs>(s_ds_ + ds_stage(n), first_key(), chunk, scores);
    }
    if constexpr (kC.terms == Terms::kBias) store_dbias<kMasked>(scores, n, chunk);
  }

  template <bool kMasked, int kN>
  __device__ __forceinline__ bool share_chunk(int n, int chunk) {
    ptx::Fragment weights[kM][kN], scores[kM][kN];
    const bool dirty = weigh<kMasked>(weights, scores, n, chunk);
    tile::store_fragments<T, TileDs>(s_weights_, first_key(), chunk, weights);
    tile::store_fragments<T, TileDs>(s_ds_ + ds_stage(n), first_key(), chunk, scores);
    if constexpr (kC.terms == Terms::kBias) store_dbias<kMasked>(scores, n, chunk);
    return dirty;
  }
  template <bool kDirty>
  __device__ __forceinline__ void add_shared_products(int n) {
    tile::add_rows_by_rows<T, kDirty, TileDs, TileDout>(dv_, s_weights_, first_key(),
                                                        s_dout_ + n % 2 * TileDout::kBytes,
                                                        share() * (kC.dim_v / kShare));
    tile::add_rows_by_rows<T, kDirty, TileDs, TileQ>(dk_, s_ds_ + ds_stage(n), first_key(),
                                                     s_q_ + n % 2 * TileQ::kBytes,
                                                     share() * (kC.dim_qk / kShare));
  }

  template <int kN>
  __device__ __forceinline__ void add_products(const ptx::Fragment (&weights)[kM][kN],
                                               const ptx::Fragment (&scores)[kM][kN], uint32_t s_q,
                                               uint32_t s_dout, int chunk, bool dirty) {
    if constexpr (kWantDv) tile::add_weighted_rows<T, TileDout>(dv_, weights, s_dout, chunk, dirty);
    if constexpr (kWantDk) tile::add_weighted_rows<T, TileQ>(dk_, scores, s_q, chunk, dirty);
  }

  // What the rung before the n-th adds to dq: everybody has stored its gradients of scores. Where
  // in a step it is done is of no matter but to the registers.
  __device__ __forceinline__ void add_dq_before(int n) const {
    if constexpr (kWantDq) {
      if (n > 0) {
        add_dq(n - 1);
      } else if constexpr (!kMask) {
        look_at_keys();
      }
    }
  }

  // Whether keys are finite; and values, which a mask may hide, and then before the first rung.
  __device__ __forceinline__ void look_at_keys() const {
    bool found = tile::holds_nonfinite<T, TileK>(s_k_, kThreads);
    if constexpr (kMask) found |= tile::holds_nonfinite<T, TileV>(s_v_, kThreads);
    found = __syncthreads_or(found);
    if (threadIdx.x == 0) place_.dirty_keys = found;
    if constexpr (kMask) __syncthreads();
  }

  // Of the n-th rung, whose gradients of scores everybody has stored.
  __device__ __forceinline__ void add_dq(int n) const {
    ptx::Fragment dq[kDqM][kDqN];
    tile::clear(dq);
    const uint32_t s_ds = s_ds_ + n % 2 * TileDs::kBytes;
    const int at_warp = warp<true>();
    const int row = at_warp % kDqWarpsM * kDqM * 16, col = at_warp / kDqWarpsM * kDqN * 8;
    if (place_.dirty_keys) {
      tile::add_columns_by_rows<T, true, TileDs, TileK>(dq, s_ds, row, s_k_, col);
    } else {
      tile::add_columns_by_rows<T, false, TileDs, TileK>(dq, s_ds, row, s_k_, col);
    }
    const int tile = place_.rungs[n % 4].tile;
    const int64_t at = place_.sum_row + int64_t{tile} * kTileQ + row;
    using Turn = Turns<kTileQ, kC.key_warps>;
    if constexpr (kInTurn) Turn::wait(a_, place_.sum_row, tile, place_.rungs[n % 4].turn);
    add_to_sums<kC.dim_qk>(a_.dq_sum, at, col, dq, kReads ? lane_anew() : threadIdx.x % 32);
    if constexpr (kInTurn) Turn::pass(a_, place_.sum_row, tile);
  }

  __device__ __forceinline__ void add_sums() const {
    const int key = place_.key_begin + first_key(), keys = stored_keys() - key;
    const int64_t at = key_sum_row(a_.p, place_) + key;
    add_key_sums<kC.dim_qk, kOrder>(a_.dk_sum, at, keys, share() * (kC.dim_qk / kShare), dk_);
    add_key_sums<kC.dim_v, kOrder>(a_.dv_sum, at, keys, share() * (kC.dim_v / kShare), dv_);
  }

  // Through the memory of the keys, which nobody reads any more.
  __device__ __forceinline__ void store() const {
    if constexpr (kWantDk) {
      tile::stage_rows<T, TileK, kOrder>(s_k_, first_key(), share() * (kC.dim_qk / kShare), dk_,
                                         [&](int) { return a_.p.scale; });
    }
    if constexpr (kWantDv) {
      tile::stage_rows<T, TileV, kOrder>(s_v_, first_key(), share() * (kC.dim_v / kShare), dv_,
                                         [](int) { return 1.0f; });
    }
    __syncthreads();
    const auto put = [&]<typename Tile>(Tile, uint32_t shared, const Rows& t, int cols,
                                        bool vector) {
      T* const first = rows_at<T>(t, place_.s, place_.s.kv_row + place_.key_begin, place_.head_kv);
      tile::store_staged_rows<T, Tile, kThreads>(shared, stored_keys() - place_.key_begin, cols,
                                                 vector,
                                                 [&](int row) { return first + row * t.row; });
    };
    if constexpr (kWantDk) put(TileK{}, s_k_, a_.dk, a_.p.dim_qk, a_.vector_dk);
    if constexpr (kWantDv) put(TileV{}, s_v_, a_.dv, a_.p.dim_v, a_.vector_dv);
  }

  const BackwardArguments& a_;
  RungPlace& place_;
  const KeyRows<kTileQ, kTileKv, kThreads, kC.terms> rows_;
  uint32_t s_k_, s_v_, s_q_, s_dout_, s_ds_, s_weights_;
  uint32_t k_[kM][kC.keys_in_registers ? kC.dim_qk / 16 : 1][4];
  uint32_t v_[kM][kC.keys_in_registers ? kC.dim_v / 16 : 1][4];
  ptx::Fragment dk_[kM][kWantDk ? kC.dim_qk / 8 / kShare : 1];
  ptx::Fragment dv_[kM][kWantDv ? kC.dim_v / 8 / kShare : 1];
};

template <typename Shape, int kSums>
__global__ void __launch_bounds__(kKeyConfig<Shape, static_cast<KeySums>(kSums)>.key_threads(),
                                  kKeyConfig<Shape, static_cast<KeySums>(kSums)>.key_blocks)
    backward_keys_kernel(const __grid_constant__ BackwardArguments a) {
  ptx::wait_for_earlier_kernels();
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ RungPlace place;
  KeyBlock<Shape, static_cast<KeySums>(kSums)>(a, place, memory).run();
}

}  // namespace fovea::cuda
