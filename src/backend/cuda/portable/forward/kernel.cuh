// Forward on tensor cores: a block holds a tile of query rows of one KV head and walks over the
// tiles of keys they see, K and V coming through two stages of shared memory.
//
// Most tiles are seen whole and their scores stay near the largest of the first tile, so they are
// weighed by that alone. When sums show that they did not stay near, or outputs that a value which
// is not finite met a hidden key, the block does its work again, carefully.
#pragma once

#include <type_traits>

#include "backend/cuda/portable/forward/bias_terms.cuh"
#include "backend/cuda/portable/forward/computed_terms.cuh"
#include "backend/cuda/portable/forward/epilogue.cuh"
#include "backend/cuda/portable/forward/join.cuh"
#include "backend/cuda/portable/forward/mask_terms.cuh"
#include "backend/cuda/portable/forward/nonfinite.cuh"
#include "backend/cuda/portable/forward/place.cuh"
#include "backend/cuda/portable/forward/scores.cuh"
#include "backend/cuda/portable/forward/stages.cuh"
#include "prim/cuda/ptx/grid_dependency.cuh"
#include "prim/cuda/tile/products.cuh"

namespace fovea::cuda {

template <typename Shape>
class ForwardBlock {
  using T = typename Shape::Element;
  static constexpr ForwardConfig kC = Shape::kConfig;
  static constexpr bool kAnyTerms = kC.terms == Terms::kAny;
  static constexpr bool kComputed = kC.terms == Terms::kComputed;
  // Where registers allow, softcap is applied in one go with the weights, by code of its own.
  static constexpr bool kApart = kComputed && kC.dim_qk <= 64;
  static constexpr bool kBias = kC.terms == Terms::kBias, kMask = kC.terms == Terms::kMask;
  static constexpr bool kRead = kBias || kMask;
  // A warp that shares its rows may see none of the keys, and cannot tell small weights from none.
  static constexpr bool kMayBeBounded = kC.terms == Terms::kNone && kC.key_warps == 1;
  static constexpr int kM = kC.m_tiles, kOut = kC.dim_v / 8;
  static constexpr int kTileQ = kC.tile_q(), kTileKv = kC.tile_kv;
  static constexpr int kSharing = kC.key_warps;
  static constexpr int kThreads = kC.threads();
  // Work that is done again begins with turns of the loop that only load, so that there is one
  // place for it; but where turns are few or short, or have terms to read besides, questions in
  // them would show.
  static constexpr bool kLoadsAgain = kRead || kSharing > 1 || kC.short_turns();
  using Stages = ForwardStages<Shape>;
  using TileQ = typename Stages::TileQ;
  using TileK = typename Stages::TileK;
  using TileV = typename Stages::TileV;
  struct NothingRead {
    __device__ __forceinline__ NothingRead(const Problem&, const Place&, uint32_t, int) {}
  };
  using Read =
      std::conditional_t<kBias,
                         BiasTerms<T, kM, kC.chunk_kv, kTileKv == kC.chunk_kv, kC.q_in_registers>,
                         std::conditional_t<kMask, MaskTerms<kM, kC.chunk_kv>, NothingRead>>;

 public:
  __device__ __forceinline__ ForwardBlock(const ForwardArguments& a, SharedForwardPlace& place,
                                          uint32_t shared)
      : a_(a), place_(place), stages_(a, shared), read_(a.p, place, stages_.end(), kTileQ) {}

  __device__ __forceinline__ void run() {
    if (!start()) return;
    for (int turn = 0;; turn = kLoadsAgain ? 0 : -2) {
      softmax_.start(bounded());
      start_sink();
      tile::clear(out_);
      settled_ = bounded();
      [[maybe_unused]] int first = kRead ? Stages::first_key(place_, 0) : 0, next = -1;
      // The first two tiles have been asked for, or are in two turns before that of the first.
#pragma unroll 1
      for (int n = turn; n < place_.count; ++n) {
        if (n >= 0) {
          if (n == 0) {
            ptx::cp_async_wait<1>();
          } else {
            ptx::cp_async_wait<0>();
          }
          if (n == 0) stages_.round_queries();
          __syncthreads();
          if constexpr (kC.q_in_registers) {
            if (n == 0) tile::rows_of_tile<TileQ>(q_, stages_.q(), first_row());
            if constexpr (kBias) {
              if (n == 0 && read_.scales_q()) read_.scale_q(q_);
            }
          }
        }
        const int ahead = n < 0 ? n + 2 : n + 1;
        if constexpr (kRead) {
          next = ahead < place_.count ? Stages::first_key(place_, ahead) : -1;
          if (n != 0 && next >= 0) stages_.load(place_, ahead % 2, next);
        } else if (n != 0 && ahead < place_.count) {
          stages_.load(place_, ahead % 2, Stages::first_key(place_, ahead));
        }
        ptx::cp_async_commit();
        if (n < 0) continue;
        const int stage = n % 2;
        if (place_.careful) {
          const bool found = hide_nonfinite<T, TileV, kThreads>(stages_.v(stage));
          if (found && threadIdx.x == 0) place_.nonfinite = true;
        }
        if constexpr (kRead) {
          tile_of_read(n, first, next);
          first = next;
        } else {
          tile(stage, Stages::first_key(place_, n));
        }
      }
      ptx::cp_async_wait<0>();
      softmax_.finish();
      // Of many blocks not sooner, or the longest ones of the next kernel gather on the SMs that
      // are done first.
      if constexpr (kSharing > 1) ptx::let_next_kernel_begin();
      // Also ends the reading of the last tile, which what follows writes over.
      if (!__syncthreads_or(!place_.careful && !plausible())) break;
      if (threadIdx.x == 0) place_.careful = true;
      __syncthreads();
      if constexpr (kLoadsAgain) stages_.load_first(place_);
    }
    if constexpr (kSharing > 1) {
      JoiningEpilogue<Shape>(a_, place_, stages_.q()).store(softmax_, out_);
    } else {
      ForwardEpilogue<Shape> epilogue(a_, place_, stages_.q(), softmax_, out_);
      if (a_.parts.count > 1) {
        epilogue.store_partial();
      } else {
        epilogue.store();
      }
    }
    if (place_.nonfinite) {
      __syncthreads();
      add_nonfinite<T>(a_, place_, a_.parts.count > 1 ? partial_row(a_, place_) : nullptr);
    }
  }

 private:
  // Finds the block's place and asks for what it needs first; false where there is nothing to do.
  // Every thread finds the place for itself, for the loads would otherwise wait for the one that
  // does; later it is read from shared memory.
  __device__ __forceinline__ bool start() {
    ForwardPlace place;
    if (a_.p.lengths_are_read()) ptx::wait_for_earlier_kernels();
    find_place<Shape>(a_, place);
    if (!stages_.begin(place)) return false;
    if (lane() == 0) place_.warps[warp()] = sights_of_warp<kM>(a_.p, place, first_row());
    if (threadIdx.x == 0) static_cast<ForwardPlace&>(place_) = place;
    __syncthreads();
    if constexpr (kRead) read_.find_rows();
    if constexpr (kComputed) computed().find_rows();
    __syncwarp();
    return true;
  }

  static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  // Which of the warps that hold the same rows this is: each takes its share of the keys.
  static __device__ __forceinline__ int share() { return warp() % kSharing; }
  static __device__ __forceinline__ int first_row() { return warp() / kSharing * kM * 16; }

  // Whether weights refer to 0, so that no score is looked at before it is weighed.
  __device__ __forceinline__ bool bounded() const {
    return kMayBeBounded && a_.bounded && !place_.careful;
  }

  // Whether the sums and outputs of this lane's rows can be trusted.
  __device__ __forceinline__ bool plausible() const {
    bool trusted = true;
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      float zero = 0;  // NaN when an output is not finite
#pragma unroll
      for (int d = 0; d < kOut; ++d) {
        zero = fmaf(out_[r / 2][d][r % 2 * 2], 0.0f, zero);
        zero = fmaf(out_[r / 2][d][r % 2 * 2 + 1], 0.0f, zero);
      }
      trusted &= zero == 0;
      if (row_in_tile<kM, kSharing>(r) >= place_.rows) continue;
      trusted &= softmax_.template in_range<T>(r, bounded());
    }
    return trusted;
  }

  // A sink is a key with no value: it starts the sums, in the first part alone.
  __device__ __forceinline__ void start_sink() {
    if (a_.p.sink == nullptr || blockIdx.y != 0 || share() != 0) return;
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      const int at = row_in_tile<kM, kSharing>(r);
      if (at >= place_.rows) continue;
      const int head = place_.head_kv * a_.p.group + place_.span.of(place_.s, at).head;
      const float logit = a_.p.sink[head * a_.p.sink_head] * kLog2e;
      if (logit == -kInfinity) continue;
      softmax_.reference[r] = logit;
      softmax_.sum[r] = lane() % 4 == 0 ? 1.0f : 0.0f;
    }
  }

  __device__ __forceinline__ void tile(int stage, int first) {
    constexpr int kChunks = kTileKv / kC.chunk_kv;
    const uint32_t s_k = stages_.k(stage), s_v = stages_.v(stage);
    const WarpSight& sight = place_.warps[warp()];
    // Terms cost more than a look at the reference. Where warps share rows and have few chunks
    // each, code that is fetched for the first time takes longer than such looks.
    constexpr bool kBold = !kAnyTerms && (kSharing == 1 || (kSharing == 2 && kC.dim_qk <= 32));
    // Small head dims spend so little on a chunk that a question at each would show.
    constexpr bool kTight = kBold && kC.dim_qk <= 64;
    // Warps without rows, or whose rows see nothing of the tile, must not hold up the others.
    if (kTight && sight.hides(first, first + kTileKv)) return;
    bool bets = kBold;
    if constexpr (kComputed) bets = computed().foreseeable();
    int c = kChunks - 1 - share();
    // Whether chunk c and those before it ask no questions.
    const auto clear = [&] {
      return kTight && bets && settled_ && !place_.careful &&
             sight.shows(first, first + (c + 1) * kC.chunk_kv);
    };
#pragma unroll 1
    for (; c >= 0 && !clear(); c -= kSharing) {
      const int chunk = c * kC.chunk_kv, begin = first + chunk;
      if (kTight && sight.hides(begin, begin + kC.chunk_kv)) continue;
      const bool all = sight.shows(begin, begin + kC.chunk_kv);
      if (!kTight && bets && settled_ && all && !place_.careful) {
        add_chunk<false, kC.chunk_kv>(s_k, s_v, chunk, begin, all);
        continue;
      }
      // In smaller steps, for a mask and a look at the reference need registers too.
      constexpr int kStep = kC.chunk_kv < 32 ? kC.chunk_kv : 32;
#pragma unroll 1
      for (int at = chunk + kC.chunk_kv - kStep; at >= chunk; at -= kStep) {
        if (!all && sight.hides(first + at, first + at + kStep)) continue;
        add_chunk<true, kStep>(s_k, s_v, at, first + at, all);
      }
      if constexpr (kBold) settled_ = settled();
    }
    if constexpr (kTight && kMayBeBounded && kC.short_turns()) {
      if (a_.products_are_exponents) {
        add_clear_chunks<true>(s_k, s_v, c, first);
        return;
      }
    }
    if constexpr (kTight && kApart) {
      if (!computed().alibi()) {
        add_capped_chunks(s_k, s_v, c);
        return;
      }
    }
    if constexpr (kTight) add_clear_chunks<false>(s_k, s_v, c, first);
  }

  // Chunk c of a tile and those before it, which ask no questions.
  template <bool kExponents>
  __device__ __forceinline__ void add_clear_chunks(uint32_t s_k, uint32_t s_v, int c, int first) {
#pragma unroll 1
    for (; c >= 0; c -= kSharing) {
      const int chunk = c * kC.chunk_kv;
      add_chunk<false, kC.chunk_kv, kExponents>(s_k, s_v, chunk, first + chunk, true);
    }
  }

  // The same with softcap, in steps so small that one vote is enough for the scores of all rows.
  __device__ __forceinline__ void add_capped_chunks(uint32_t s_k, uint32_t s_v, int c) {
    constexpr int kStep = 32;
#pragma unroll 1
    for (int at = (c + 1) * kC.chunk_kv - kStep; at >= 0; at -= kStep) {
      ptx::Fragment scores[kM][kStep / 8];
      tile::dot_fragments<T, TileK>(scores, q_, s_k, at);
      computed().cap_and_weigh(softmax_, scores, [&] {
        tile::add_weighted_rows<T, TileV>(out_, scores, s_v, at, false);
      });
    }
  }

  // The same of problems with a bias or a mask to read: the terms of a chunk are fetched while the
  // one before is worked on. Tile n begins at key `first`, the one after it at `after`, if there is
  // one.
  __device__ __forceinline__ void tile_of_read(int n, int first, int after) {
    constexpr int kKeys = kC.chunk_kv, kLast = kTileKv - kKeys;
    const WarpSight& sight = place_.warps[warp()];
    // Most tiles are seen whole and, once rows have a reference, ask no questions at their chunks.
    const bool plain = sight.shows(first, first + kTileKv) && !place_.careful &&
                       read_.whole(first + kLast) && read_.fetched(first + kLast);
    const int after_last = after >= 0 && read_.whole(after + kLast) ? after + kLast : -1;
    if constexpr (kBias) {
      if (plain && settled_) {
        read_.with_units([&](auto units) { settled_tile<units>(n, first, after_last); });
        return;
      }
    }
#pragma unroll 1
    for (int chunk = kLast; chunk >= 0; chunk -= kKeys) {
      const int begin = first + chunk, next = chunk > 0 ? begin - kKeys : after_last;
      if constexpr (kMask) {
        if (plain && read_.hides_all()) {
          read_.fetch_next(begin, next);
          continue;
        }
        // Rows that have seen nothing stay without a reference as long as nothing is shown to them.
        if (plain && (settled_ || !read_.shows_first(softmax_.reference))) {
          add_read_chunk<false>(n, chunk, begin, true, next);
          continue;
        }
      }
      if (sight.hides(begin, begin + kKeys)) continue;
      const bool now = read_.fetchable(begin);
      if (now && !read_.fetched(begin)) read_.fetch(begin);
      add_read_chunk<true>(n, chunk, begin, now, read_.whole(next) ? next : -1);
    }
  }

  // The same of a tile whose bias has been fetched, and of rows that have a reference: no chunk
  // asks a question.
  template <Units kUnits>
  __device__ __forceinline__ void settled_tile(int n, int first, int after_last) {
    constexpr int kKeys = kC.chunk_kv;
#pragma unroll 1
    for (int chunk = kTileKv - kKeys; chunk >= 0; chunk -= kKeys) {
      const int begin = first + chunk;
      add_read_chunk<false, kUnits>(n, chunk, begin, true, chunk > 0 ? begin - kKeys : after_last);
    }
  }

  // kCareful: as of add_chunk; otherwise a bias comes in kUnits. `now`: the terms have been
  // fetched. Those of keys `next` .. are to be fetched, unless negative.
  template <bool kCareful, Units kUnits = Units::kProducts>
  __device__ __forceinline__ void add_read_chunk(int n, int chunk, int begin, bool now, int next) {
    constexpr int kKeys = kC.chunk_kv;
    const uint32_t s_k = stages_.k(n % 2), s_v = stages_.v(n % 2);
    const WarpSight& sight = place_.warps[warp()];
    bool logits = false;  // are what scores are, not products
    if constexpr (kBias) logits = kCareful ? read_.scales_q() : kUnits == Units::kLogits;
    const float to_log2 = logits ? kLog2e : a_.p.scale * kLog2e;
    ptx::Fragment scores[kM][kKeys / 8];
    typename Read::Hidden hidden;
    if constexpr (kCareful) {
      read_.start(scores, begin, now, next);
      if (place_.careful) hidden = read_.masked(scores);
    } else if constexpr (kBias) {
      read_.template start_fetched<kUnits>(scores);
    } else {
      read_.start_fetched(scores);
    }
    if constexpr (kC.q_in_registers && kBias && !kCareful) {
      tile::add_dot_fragments<T, TileK>(scores, q_, s_k, chunk,
                                        [&] { read_.fetch_next(begin, next); });
    } else if constexpr (kC.q_in_registers) {
      tile::add_dot_fragments<T, TileK>(scores, q_, s_k, chunk);
    } else {
      if constexpr (kBias && !kCareful) read_.fetch_next(begin, next);
      tile::add_dot_rows<T, TileQ, TileK>(scores, stages_.q(), first_row(), s_k, chunk);
    }
    if constexpr (kCareful) {
      if (place_.careful) read_.hide(scores, hidden);
      if (!sight.shows(begin, begin + kKeys)) read_.hide_unseen(scores, begin);
      if (!settled_) {
        softmax_.look(scores, out_, to_log2);
        settled_ = !place_.careful && settled();
      }
    } else if constexpr (kMask) {
      read_.fetch_next(begin, next);  // while the product is worked on
    }
    softmax_.weigh(scores, to_log2);
    tile::add_weighted_rows<T, TileV>(out_, scores, s_v, chunk, false);
  }

  __device__ __forceinline__ ComputedTerms<T, kM> computed() const {
    return {a_.p, place_, stages_.end()};
  }

  // Whether every row has a reference to weigh its scores by. A bias may push keys so far down that
  // others outgrow them by any factor: such keys are no reference.
  __device__ __forceinline__ bool settled() const {
    constexpr float kLeast = kBias ? -64.0f : -kInfinity;
    bool all = true;
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      // Rows past the last have the terms of the first.
      all &=
          softmax_.reference[r] > kLeast || (!kRead && row_in_tile<kM, kSharing>(r) >= place_.rows);
    }
    return __all_sync(0xffffffffu, all);
  }

  // kCareful: some row may not see some key (unless `all`), or the reference may have to move.
  // Otherwise a computed term is ALiBi where softcap has code of its own. kExponents: as of
  // RunningSoftmax.
  template <bool kCareful, int kKeys, bool kExponents = false>
  __device__ __forceinline__ void add_chunk(uint32_t s_k, uint32_t s_v, int chunk, int first,
                                            bool all) {
    const bool alibi = kComputed && ((kApart && !kCareful) || computed().alibi());
    const float to_log2 = kAnyTerms             ? kLog2e
                          : kComputed && !alibi ? a_.p.softcap * kLog2e
                                                : a_.p.scale * kLog2e;
    ptx::Fragment scores[kM][kKeys / 8];
    if (alibi) {
      computed().template start<!kCareful>(scores, first);
    } else {
      tile::clear(scores);
    }
    if constexpr (kC.q_in_registers) {
      tile::add_dot_fragments<T, TileK>(scores, q_, s_k, chunk);
    } else {
      tile::add_dot_rows<T, TileQ, TileK>(scores, stages_.q(), first_row(), s_k, chunk);
    }
    const ScoreRows<T, kM, kSharing> rows(a_.p, place_);
    if constexpr (kComputed) {
      if (!alibi) computed().cap(scores);
    }
    if constexpr (kAnyTerms) rows.apply_terms(scores, first);
    if constexpr (kCareful) {
      if (!all) rows.hide_unseen(scores, first);
      if (!bounded()) softmax_.look(scores, out_, to_log2);
      softmax_.weigh(scores, to_log2);
    } else {
      constexpr int kMixed = kC.width == Width::kCrowded ? (kExponents ? 3 : 1) : 0;
      softmax_.template weigh<kMixed, kExponents>(scores, to_log2);
    }
    if constexpr (kAnyTerms) {
      if (a_.p.drop_threshold != 0) rows.drop(scores, first);
    }
    tile::add_weighted_rows<T, TileV>(out_, scores, s_v, chunk, false);
  }

  const ForwardArguments& a_;
  SharedForwardPlace& place_;
  const Stages stages_;
  uint32_t q_[kM][kC.q_pieces()][4];
  bool settled_;  // every row has a reference
  Read read_;
  RunningSoftmax<kM> softmax_;
  ptx::Fragment out_[kM][kOut];
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), Shape::kConfig.blocks)
    forward_kernel(const __grid_constant__ ForwardArguments a) {
  if (ptx::blocks_are_few()) ptx::let_next_kernel_begin();
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ SharedForwardPlace place;
  ForwardBlock<Shape>(a, place, ptx::shared_address(memory)).run();
}

}  // namespace fovea::cuda
