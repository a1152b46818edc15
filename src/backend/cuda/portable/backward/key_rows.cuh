// What a block of keys keeps in shared memory about the rows of its rungs: lse, delta, the keys
// that they see, and what their term needs.
#pragma once

#include "backend/cuda/portable/backward/element.cuh"
#include "backend/cuda/portable/backward/key_terms.cuh"
#include "backend/cuda/portable/backward/ladder.cuh"
#include "prim/cuda/ptx/cp_async.cuh"
#include "prim/cuda/ptx/ldmatrix.cuh"

namespace fovea::cuda {

template <int kTileQ, int kTileKv, int kThreads, Terms kTerms>
class KeyRows {
  static constexpr bool kReads = kReadsTerm<kTerms>;
  static constexpr int kWords = BackwardConfig::row_stats(kTerms);

 public:
  // [stage][lse2, delta, sight (two), term (two)][kTileQ]
  __device__ __forceinline__ KeyRows(const BackwardArguments& a, const RungPlace& place,
                                     float* memory)
      : a_(a), place_(place), memory_(memory), shared_(ptx::shared_address(memory)) {}

  __device__ __forceinline__ const float* stats(int stage) const {
    return memory_ + stage * kWords * kTileQ;
  }
  __device__ __forceinline__ const int2* sights(int stage) const {
    return reinterpret_cast<const int2*>(stats(stage) + 2 * kTileQ);
  }
  // In shared memory, from row `row` on.
  __device__ __forceinline__ uint32_t terms(int stage, int row) const {
    return shared_ + (stage * kWords * kTileQ + 4 * kTileQ + 2 * row) * 4;
  }

  // lse and delta come by cp.async.
  __device__ __forceinline__ void load(int stage, const Rung& rung, const RowSpan& span,
                                       int rows) const {
    const int at = stage * kWords * kTileQ;
    int2* const sights = reinterpret_cast<int2*>(memory_ + at + 2 * kTileQ);
    for (int r = threadIdx.x; r < kTileQ; r += kThreads) {
      if (r >= rows) {  // rows past the last: weights of zero, and any term
        memory_[at + r] = kInfinity;
        memory_[at + kTileQ + r] = 0;
        sights[r] = {-1, -1};
        find_term(at, r, rung, span.of(place_.s, 0));
        continue;
      }
      const Row which = span.of(place_.s, r);
      const int64_t from =
          stat_index(a_, place_.s, place_.head_kv * a_.p.group + which.head, which.i);
      ptx::cp_async_4(shared_ + (at + r) * 4, a_.lse2 + from);
      ptx::cp_async_4(shared_ + (at + kTileQ + r) * 4, a_.delta + from);
      if (kTerms == Terms::kAny || kReads || rung.masked) {
        const Sight sight = sight_of(a_.p, place_.s, which.i);
        sights[r] = {sight.begin, sight.end};
      }
      find_term(at, r, rung, which);
    }
  }

 private:
  // Where the term of row r begins in its tensor, or ALiBi's slope in log2 units and the position.
  __device__ __forceinline__ void find_term(int at, int r, const Rung& rung, Row which) const {
    const Problem& p = a_.p;
    float* const to = memory_ + at + 4 * kTileQ + 2 * r;
    const int head = place_.head_kv * p.group + which.head;
    if constexpr (kReads) {
      const uint64_t begin = term_begin<kTerms>(p, place_.b, head, which.i);
      *reinterpret_cast<uint64_t*>(to) = begin;
      if (rung.masked || !p.term_runs) return;
      // On its way to the L2 cache by the time that a chunk asks for it.
      constexpr int kBytes = kTerms == Terms::kMask ? 1 : 2;
#pragma unroll
      for (int x = 0; x < kTileKv * kBytes; x += 128) {
        ptx::prefetch_line(begin + static_cast<uint64_t>(place_.key_begin * kBytes + x));
      }
    } else if constexpr (kTerms == Terms::kComputed) {
      if (p.alibi == nullptr) return;
      const float slope = p.alibi[place_.b * p.alibi_batch + head * p.alibi_head];
      const int position = which.i + place_.s.kv_len - place_.s.q_len;
      *reinterpret_cast<float2*>(to) = {-slope * kLog2e, static_cast<float>(position)};
    }
  }

  const BackwardArguments& a_;
  const RungPlace& place_;
  float* const memory_;
  const uint32_t shared_;
};

}  // namespace fovea::cuda
