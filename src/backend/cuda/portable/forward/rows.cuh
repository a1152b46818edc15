// The rows of a warp: their queries, running softmax and sums, and what a chunk of keys in shared
// memory adds to them.
#pragma once

#include <type_traits>

#include "backend/cuda/portable/forward/bias_terms.cuh"
#include "backend/cuda/portable/forward/computed_terms.cuh"
#include "backend/cuda/portable/forward/mask_terms.cuh"
#include "backend/cuda/portable/forward/place.cuh"
#include "backend/cuda/portable/forward/scores.cuh"
#include "backend/cuda/portable/forward/stages.cuh"
#include "prim/cuda/tile/products.cuh"

namespace fovea::cuda {

template <typename Shape>
class ForwardRows {
 protected:
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
  static constexpr bool kCrowded = kC.width == Width::kCrowded;
  static constexpr int kM = kC.m_tiles, kOut = kC.dim_v / 8;
  static constexpr int kTileQ = kC.tile_q(), kTileKv = kC.tile_kv;
  static constexpr int kSharing = kC.key_warps;
  static constexpr int kThreads = kC.threads();
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

  __device__ __forceinline__ ForwardRows(const ForwardArguments& a, SharedForwardPlace& place,
                                         uint32_t shared)
      : a_(a), place_(place), stages_(a, shared), read_(a.p, place, stages_.end(), kTileQ) {}

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
    } else if constexpr (kExponents && kCrowded) {
      add_exponents(scores, s_v, chunk);
      return;
    } else {
      softmax_.template weigh<kCrowded ? 1 : 0, kExponents>(scores, to_log2);
    }
    if constexpr (kAnyTerms) {
      if (a_.p.drop_threshold != 0) rows.drop(scores, first);
    }
    tile::add_weighted_rows<T, TileV>(out_, scores, s_v, chunk, false);
  }

  // What scores that are exponents add, 16 keys after another: the order of instructions that
  // compilers make of it is 2 % faster than that of all weights first.
  template <int kN>
  __device__ __forceinline__ void add_exponents(ptx::Fragment (&scores)[kM][kN], uint32_t s_v,
                                                int chunk) {
    static_assert(kOut == 2);
    const auto v_at = TileV::Lane::rows_first();
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t v[4];
      ptx::ldmatrix_x4_trans(v, s_v + v_at.at(chunk + n * 8, 0));
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        softmax_.weigh_exponents(m, scores[m][n], scores[m][n + 1], (n / 2 + m) % 2 != 0);
        uint32_t weights[4];
        tile::pack_fragments<T>(weights, scores[m][n], scores[m][n + 1]);
        ptx::mma_m16n8k16<T>(out_[m][0], weights, v[0], v[1]);
        ptx::mma_m16n8k16<T>(out_[m][1], weights, v[2], v[3]);
      }
    }
  }

  // The same with softcap, of keys that all rows see and rows that have a reference.
  template <int kKeys>
  __device__ __forceinline__ void add_capped(uint32_t s_k, uint32_t s_v, int chunk) {
    ptx::Fragment scores[kM][kKeys / 8];
    tile::dot_fragments<T, TileK>(scores, q_, s_k, chunk);
    computed().cap_and_weigh(softmax_, scores, [&] {
      tile::add_weighted_rows<T, TileV>(out_, scores, s_v, chunk, false);
    });
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

}  // namespace fovea::cuda
