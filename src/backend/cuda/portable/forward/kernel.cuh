// Forward on tensor cores: a block holds a tile of query rows of one KV head and walks over the
// tiles of keys they see, K and V coming through two stages of shared memory.
//
// Most tiles are seen whole and their scores stay near the largest of the first tile, so they are
// weighed by that alone. When sums show that they did not stay near, or outputs that a value which
// is not finite met a hidden key, the block does its work again, carefully.
#pragma once

#include "backend/cuda/portable/forward/epilogue.cuh"
#include "backend/cuda/portable/forward/join.cuh"
#include "backend/cuda/portable/forward/nonfinite.cuh"
#include "backend/cuda/portable/forward/rows.cuh"
#include "prim/cuda/ptx/grid_dependency.cuh"

namespace fovea::cuda {

template <typename Shape>
class ForwardBlock : ForwardRows<Shape> {
  using Rows = ForwardRows<Shape>;
  using T = typename Shape::Element;
  using Rows::a_, Rows::place_, Rows::stages_, Rows::q_, Rows::settled_, Rows::read_;
  using Rows::kC, Rows::kAnyTerms, Rows::kComputed, Rows::kApart, Rows::kBias, Rows::kMask;
  using Rows::kRead, Rows::kMayBeBounded, Rows::kM, Rows::kTileKv, Rows::kSharing, Rows::kThreads;
  using Rows::softmax_, Rows::out_;
  using Rows::warp, Rows::lane, Rows::share, Rows::first_row, Rows::bounded, Rows::computed;
  using typename Rows::Stages, typename Rows::TileQ, typename Rows::TileK, typename Rows::TileV;

  // Work that is done again begins with turns of the loop that only load, so that there is one
  // place for it; but where turns are few or short, or have terms to read besides, questions in
  // them would show.
  static constexpr bool kLoadsAgain = kRead || kSharing > 1 || kC.short_turns();
  static constexpr int kChunks = kTileKv / kC.chunk_kv, kAllTiles = kChunks;
  // Terms cost more than a look at the reference. Where warps share rows and have few chunks each,
  // code that is fetched for the first time takes longer than such looks.
  static constexpr bool kBold = !kAnyTerms && (kSharing == 1 || (kSharing == 2 && kC.dim_qk <= 32));
  // Small head dims spend so little on a chunk that a question at each would show; and without
  // terms so little on a tile that those at each tile do.
  static constexpr bool kTight = kBold && kC.dim_qk <= 64;
  static constexpr bool kWalks = kC.walks();

 public:
  __device__ __forceinline__ ForwardBlock(const ForwardArguments& a, SharedForwardPlace& place,
                                          uint32_t shared)
      : Rows(a, place, shared) {}

  __device__ __forceinline__ void run() {
    if (!start()) return;
    for (int turn = 0;; turn = kLoadsAgain ? 0 : -2) {
      softmax_.start(bounded());
      this->start_sink();
      tile::clear(out_);
      settled_ = bounded();
      [[maybe_unused]] int first = kRead ? Stages::first_key(place_, 0) : 0, next = -1;
      // The first two tiles have been asked for, or are in two turns before that of the first.
#pragma unroll 1
      for (int n = turn; n < place_.count; ++n) {
        bool walks = false;
        if (n >= 0) {
          if (n == 0) {
            ptx::cp_async_wait<1>();
          } else {
            ptx::cp_async_wait<0>();
          }
          if (n == 0) stages_.round_queries();
          walks = kWalks && n >= place_.plain && !place_.careful;
          if (walks) {
            walks = __syncthreads_and(settled_ || first_row() >= place_.rows);
          } else {
            __syncthreads();
          }
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
          tile(n, walks);
        }
        if (walks) break;
      }
      ptx::cp_async_wait<0>();
      softmax_.finish();
      // Of many blocks not sooner, or the longest ones of the next kernel gather on the SMs that
      // are done first.
      if constexpr (kSharing > 1) ptx::let_next_kernel_begin();
      // Also ends the reading of the last tile, which what follows writes over.
      if (!__syncthreads_or(!place_.careful && !this->plausible())) break;
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

  // Tile n; with `walks` it and all that follow, which are plain, with rows that have a reference.
  __device__ __forceinline__ void tile(int n, bool walks) {
    const int first = Stages::first_key(place_, n);
    const uint32_t s_k = stages_.k(n % 2), s_v = stages_.v(n % 2);
    const int c = walks ? kAllTiles : ask_chunks(s_k, s_v, first);
    if constexpr (kWalks) {
      if constexpr (kMayBeBounded) {
        if (a_.products_are_exponents && bounded()) {
          walk<true>(n, c);
          return;
        }
      }
      walk<false>(n, c);
    } else if constexpr (kTight) {
      if constexpr (kApart) {
        if (!computed().alibi()) {
          add_capped_chunks(s_k, s_v, c);
          return;
        }
      }
      add_clear_chunks<false>(s_k, s_v, c, first);
    }
  }

  // This warp's chunks of a tile until they ask no questions: gives the first of those, or a
  // negative number.
  __device__ __forceinline__ int ask_chunks(uint32_t s_k, uint32_t s_v, int first) {
    const WarpSight& sight = place_.warps[warp()];
    // Warps without rows, or whose rows see nothing of the tile, must not hold up the others.
    if (kTight && sight.hides(first, first + kTileKv)) return -1;
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
        this->template add_chunk<false, kC.chunk_kv>(s_k, s_v, chunk, begin, all);
        continue;
      }
      // In smaller steps, for a mask and a look at the reference need registers too.
      constexpr int kStep = kC.chunk_kv < 32 ? kC.chunk_kv : 32;
#pragma unroll 1
      for (int at = chunk + kC.chunk_kv - kStep; at >= chunk; at -= kStep) {
        if (!all && sight.hides(first + at, first + at + kStep)) continue;
        this->template add_chunk<true, kStep>(s_k, s_v, at, first + at, all);
      }
      if constexpr (kBold) settled_ = this->settled();
    }
    return c;
  }

  // Chunk c of a tile and those before it, which ask no questions.
  template <bool kExponents>
  __device__ __forceinline__ void add_clear_chunks(uint32_t s_k, uint32_t s_v, int c, int first) {
#pragma unroll 1
    for (; c >= 0; c -= kSharing) {
      const int chunk = c * kC.chunk_kv;
      this->template add_chunk<false, kC.chunk_kv, kExponents>(s_k, s_v, chunk, first + chunk,
                                                               true);
    }
  }

  // The same of tile n; or, for kAllTiles, of this one and all that follow. From one to the next
  // nothing is asked, and little is kept in registers, for they are what the chunks' schedule
  // wants.
  template <bool kExponents>
  __device__ __forceinline__ void walk(int n, int c) {
    int left = 1;
    if (c == kAllTiles) {
      left = place_.count - n;
      c = last_chunk();
    }
#pragma unroll 1
    for (int stage = n % 2;; stage ^= 1) {
      add_clear_chunks<kExponents>(stages_.k(stage), stages_.v(stage), c, 0);
      if (--left == 0) break;
      ptx::cp_async_wait<0>();
      __syncthreads();
      if (left > 1) {
        stages_.load_plain(place_, stage, Stages::first_key_from_end(place_, left - 1));
      }
      ptx::cp_async_commit();
      c = last_chunk();
    }
    if constexpr (kExponents) softmax_.start_references(true);  // which are not kept meanwhile
  }
  // Of a tile of which this warp's rows, if there are any, see all.
  __device__ __forceinline__ int last_chunk() const {
    return first_row() < place_.rows ? kChunks - 1 : -1;
  }

  // The same with softcap, in steps so small that one vote is enough for the scores of all rows.
  __device__ __forceinline__ void add_capped_chunks(uint32_t s_k, uint32_t s_v, int c) {
    constexpr int kStep = 32;
#pragma unroll 1
    for (int at = (c + 1) * kC.chunk_kv - kStep; at >= 0; at -= kStep) {
      this->template add_capped<kStep>(s_k, s_v, at);
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
          this->template add_read_chunk<false>(n, chunk, begin, true, next);
          continue;
        }
      }
      if (sight.hides(begin, begin + kKeys)) continue;
      const bool now = read_.fetchable(begin);
      if (now && !read_.fetched(begin)) read_.fetch(begin);
      this->template add_read_chunk<true>(n, chunk, begin, now, read_.whole(next) ? next : -1);
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
      this->template add_read_chunk<false, kUnits>(n, chunk, begin, true,
                                                   chunk > 0 ? begin - kKeys : after_last);
    }
  }
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
