// Forward on tensor cores: a block holds a tile of query rows of one KV head and walks over the
// tiles of keys they see, K and V coming through two stages of shared memory.
//
// Most tiles are seen whole and their scores stay near the largest of the first tile, so they are
// weighed by that alone. When sums show that they did not stay near, or outputs that a value which
// is not finite met a hidden key, the block does its work again, carefully.
#pragma once

#include "backend/cuda/portable/forward/config.h"
#include "backend/cuda/portable/forward/nonfinite.cuh"
#include "backend/cuda/portable/forward/softmax.cuh"
#include "backend/cuda/portable/loads.cuh"
#include "backend/cuda/portable/terms.cuh"
#include "prim/cuda/tile/products.cuh"

namespace fovea::cuda {

// The keys that some row of a warp sees, and those that all of them see.
struct WarpSight {
  int any_begin, any_end, all_begin, all_end, prefix;

  __device__ __forceinline__ bool hides(int begin, int end) const {
    return (begin >= any_end || end <= any_begin) && begin >= prefix;
  }
  __device__ __forceinline__ bool shows(int begin, int end) const {
    return (begin >= all_begin && end <= all_end) || end <= prefix;
  }
};

struct ForwardPlace : Place {
  KeyTiles tiles;
  int count;       // of them
  bool careful;    // the work is being done again
  bool nonfinite;  // and a tile held values that are not finite
  WarpSight warps[8];
};

template <typename Shape>
class ForwardBlock {
  using T = typename Shape::Element;
  static constexpr ForwardConfig kC = Shape::kConfig;
  static constexpr int kM = kC.m_tiles, kOut = kC.dim_v / 8;
  static constexpr int kTileQ = kC.tile_q(), kTileKv = kC.tile_kv;
  static constexpr int kThreads = kC.threads();
  using TileQ = tile::SharedTile<T, kTileQ, kC.dim_qk>;
  using TileK = tile::SharedTile<T, kTileKv, kC.dim_qk>;
  using TileV = tile::SharedTile<T, kTileKv, kC.dim_v>;
  using TileOut = tile::SharedTile<T, kTileQ, kC.dim_v>;
  static constexpr bool kAnyTerms = kC.terms == Terms::kAny;

 public:
  __device__ __forceinline__ ForwardBlock(const ForwardArguments& a, ForwardPlace& place,
                                          uint32_t shared)
      : a_(a),
        place_(place),
        s_q_(shared),
        s_k_(shared + TileQ::kBytes),
        s_v_(s_k_ + 2 * TileK::kBytes) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) find_place();
    __syncthreads();
    if (place_.rows <= 0) return;
    if (lane() == 0) place_.warps[warp()] = sights_of_warp();
    __syncwarp();
    load_queries<T, TileQ, kThreads>(s_q_, a_.q, place_, a_.p.group, place_.span, place_.rows,
                                     a_.p.dim_qk, a_.vector_qk,
                                     whole_fragments<TileQ>(place_.rows));
    for (;;) {
      softmax_.start();
      start_sink();
      tile::clear(out_);
      settled_ = false;
      if (place_.count > 0) load_stage(0, first_key(0));
      ptx::cp_async_commit();
      for (int n = 0; n < place_.count; ++n) {
        ptx::cp_async_wait<0>();
        __syncthreads();
        if constexpr (kC.q_in_registers) {
          if (n == 0) tile::rows_of_tile<TileQ>(q_, s_q_, warp() * kM * 16);
        }
        const int stage = n % 2;
        if (n + 1 < place_.count) load_stage(1 - stage, first_key(n + 1));
        ptx::cp_async_commit();
        if (place_.careful) {
          const bool found = hide_nonfinite<T, TileV, kThreads>(s_v_ + stage * TileV::kBytes);
          if (found && threadIdx.x == 0) place_.nonfinite = true;
        }
        tile(stage, first_key(n));
      }
      ptx::cp_async_wait<0>();
      softmax_.finish();
      // Also ends the reading of the last tile, which the epilogue writes over.
      if (!__syncthreads_or(!place_.careful && !plausible())) break;
      if (threadIdx.x == 0) place_.careful = true;
      __syncthreads();
    }
    if (a_.parts > 1) {
      store_partial();
    } else {
      store();
    }
    if (place_.nonfinite) {
      __syncthreads();
      add_nonfinite<T>(a_, place_, a_.parts > 1 ? partial_row() : nullptr);
    }
  }

 private:
  // By one thread.
  __device__ __forceinline__ void find_place() const {
    const Problem& p = a_.p;
    ForwardPlace& place = place_;
    const int tiles = (p.group * p.q_len + kTileQ - 1) / kTileQ, heads = a_.batch * p.head_kv;
    const int item = blockIdx.x;
    const int head = a_.longest_first ? item % heads : item / tiles;
    const int rank = a_.longest_first ? item / heads : item % tiles;
    // The last rows first: under a causal mask they are the longest. Of all heads, where the tiles
    // of a head are whole.
    int tile = tiles - 1 - rank;
    if (p.q_len % kTileQ == 0) {
      tile = rank % p.group * (p.q_len / kTileQ) + p.q_len / kTileQ - 1 - rank / p.group;
    }
    place.row = tile * kTileQ;
    place.head_kv = head % p.head_kv;
    place.b = head / p.head_kv;
    place.s = sequence_at(p, place.b);
    place.rows = min(p.group * place.s.q_len - place.row, kTileQ);
    place.span = RowSpan::at(place.s, place.row, max(place.rows, 1));
    place.key_begin = blockIdx.y * a_.part_keys;
    place.key_end = min(place.key_begin + a_.part_keys, place.s.kv_len);
    if (place.rows <= 0) return;
    place.careful = place.nonfinite = false;
    place.tiles =
        key_tiles(p, place.s, place.row, place.rows, place.key_begin, place.key_end, kTileKv);
    place.count = place.key_end > place.key_begin ? place.tiles.count() : 0;
  }
  // Of the n-th tile of keys.
  __device__ __forceinline__ int first_key(int n) const {
    return place_.key_begin + place_.tiles.tile(n) * kTileKv;
  }

  static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  // Row in the tile of index r of this lane's 2 * kM rows.
  static __device__ __forceinline__ int row_in_tile(int r) {
    return (warp() * kM + r / 2) * 16 + r % 2 * 8 + lane() / 4;
  }

  __device__ __forceinline__ void load_stage(int stage, int first) {
    // Fragments past the last key are not looked at.
    const int end = place_.key_end, filled = whole_fragments<TileK>(end - first);
    load_keys<T, TileK, kThreads>(s_k_ + stage * TileK::kBytes, a_.k, place_, first, end,
                                  a_.p.dim_qk, a_.vector_qk, filled);
    load_keys<T, TileV, kThreads>(s_v_ + stage * TileV::kBytes, a_.v, place_, first, end,
                                  a_.p.dim_v, a_.vector_v, filled);
  }

  // Whether the sums and outputs of this lane's rows can be trusted.
  __device__ __forceinline__ bool plausible() const {
    float zero = 0;  // NaN when an output is not finite
    bool in_range = true;
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      if (row_in_tile(r) < place_.rows) in_range &= softmax_.in_range(r);
#pragma unroll
      for (int d = 0; d < kOut; ++d) {
        zero = fmaf(out_[r / 2][d][r % 2 * 2], 0.0f, zero);
        zero = fmaf(out_[r / 2][d][r % 2 * 2 + 1], 0.0f, zero);
      }
    }
    return in_range && zero == 0;
  }

  // A sink is a key with no value: it starts the sums, in the first part alone.
  __device__ __forceinline__ void start_sink() {
    if (a_.p.sink == nullptr || blockIdx.y != 0) return;
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      const int at = row_in_tile(r);
      if (at >= place_.rows) continue;
      const int head = place_.head_kv * a_.p.group + place_.span.of(place_.s, at).head;
      const float logit = a_.p.sink[head * a_.p.sink_head] * kLog2e;
      if (logit == -kInfinity) continue;
      softmax_.reference[r] = logit;
      softmax_.sum[r] = lane() % 4 == 0 ? 1.0f : 0.0f;
    }
  }

  __device__ __forceinline__ WarpSight sights_of_warp() const {
    const int row = warp() * 16 * kM, last = min(row + 16 * kM, place_.rows) - 1;
    if (row > last) return {};
    const Row from = place_.span.of(place_.s, row), to = place_.span.of(place_.s, last);
    const bool one_head = from.head == to.head;
    const Sight low = sight_of(a_.p, place_.s, one_head ? from.i : 0);
    const Sight high = sight_of(a_.p, place_.s, one_head ? to.i : place_.s.q_len - 1);
    return {low.begin, high.end, high.begin, low.end, low.prefix};
  }

  __device__ __forceinline__ void tile(int stage, int first) {
    constexpr int kChunks = kTileKv / kC.chunk_kv;
    static_assert(kChunks < 32);
    const uint32_t s_k = s_k_ + stage * TileK::kBytes, s_v = s_v_ + stage * TileV::kBytes;
    const WarpSight& sight = place_.warps[warp()];
    // Small head dims spend so little on a chunk that a question at each would show. Terms cost
    // more than a look at the reference.
    constexpr bool kTight = !kAnyTerms && kC.dim_qk <= 32;
    const bool fast = kTight && !place_.careful && sight.shows(first, first + kTileKv);
    int c = kChunks - 1;
#pragma unroll 1
    for (; c >= 0 && !(kTight && fast && settled_); --c) {
      const int chunk = c * kC.chunk_kv, begin = first + chunk;
      const bool all = sight.shows(begin, begin + kC.chunk_kv);
      if (!kTight && !kAnyTerms && settled_ && all && !place_.careful) {
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
      if constexpr (!kAnyTerms) settled_ = settled();
    }
    if constexpr (kTight) {
#pragma unroll 1
      for (; c >= 0; --c) {
        add_chunk<false, kC.chunk_kv>(s_k, s_v, c * kC.chunk_kv, first + c * kC.chunk_kv, true);
      }
    }
  }

  // Whether every row has a reference to weigh its scores by.
  __device__ __forceinline__ bool settled() const {
    bool all = true;
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      all &= softmax_.reference[r] > -kInfinity || row_in_tile(r) >= place_.rows;
    }
    return __all_sync(0xffffffffu, all);
  }

  // kCareful: some row may not see some key (unless `all`), or the reference may have to move.
  template <bool kCareful, int kKeys>
  __device__ __forceinline__ void add_chunk(uint32_t s_k, uint32_t s_v, int chunk, int first,
                                            bool all) {
    const float to_log2 = kAnyTerms ? kLog2e : a_.p.scale * kLog2e;
    ptx::Fragment scores[kM][kKeys / 8];
    if constexpr (kC.q_in_registers) {
      tile::dot_fragments<T, TileK>(scores, q_, s_k, chunk);
    } else {
      tile::dot_rows<T, TileQ, TileK>(scores, s_q_, warp() * kM * 16, s_k, chunk);
    }
    if constexpr (kAnyTerms) apply_terms(scores, first);
    if constexpr (kCareful) {
      if (!all) hide_unseen(scores, first);
      softmax_.step(scores, out_, to_log2);
    } else {
      softmax_.weigh(scores, to_log2);
    }
    if constexpr (kAnyTerms) {
      if (a_.p.drop_threshold != 0) drop(scores, first);
    }
    tile::add_weighted_rows<T, TileV>(out_, scores, s_v, chunk, false);
  }

  // Calls body(row, m, x) for the lane's rows: x and x + 1 are its columns in fragments [m].
  template <typename Body>
  __device__ __forceinline__ void each_row(Body body) const {
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r)
      body(place_.span.of(place_.s, row_in_tile(r)), r / 2, r % 2 * 2);
  }

  template <int kN>
  __device__ __forceinline__ void hide_unseen(ptx::Fragment (&scores)[kM][kN], int first) const {
    each_row([&](Row row, int m, int x) {
      const Sight sight = sight_of(a_.p, place_.s, row.i);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const int key = first + n * 8 + lane() % 4 * 2;
        if (!sight.sees(key)) scores[m][n][x] = -kInfinity;
        if (!sight.sees(key + 1)) scores[m][n][x + 1] = -kInfinity;
      }
    });
  }

  // From products to logits. What a problem lacks costs a branch a chunk, not one an element.
  template <int kN>
  __device__ __forceinline__ void apply_terms(ptx::Fragment (&scores)[kM][kN], int first) const {
    const Problem& p = a_.p;
    const bool inside = first + kN * 8 <= place_.s.kv_len;
    if (p.softcap > 0) {
      const float inverse = p.scale / p.softcap;
      each_score(scores, [&](float x) { return tanh_for<T>(x * inverse) * p.softcap; });
    } else {
      each_score(scores, [&](float x) { return x * p.scale; });
    }
    if (p.bias.data != nullptr) {
      each_row([&](Row row, int m, int x) {
        const TermRow terms = terms_of(row);
        if (inside && p.bias_pairs) {
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            const float2 two = bias_pair<T>(p, terms, first + n * 8 + lane() % 4 * 2);
            scores[m][n][x] += two.x;
            scores[m][n][x + 1] += two.y;
          }
        } else {
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            const int key = first + n * 8 + lane() % 4 * 2, last = place_.s.kv_len - 1;
            scores[m][n][x] += bias_at<T>(p, terms, min(key, last));
            scores[m][n][x + 1] += bias_at<T>(p, terms, min(key + 1, last));
            one_at_a_time();
          }
        }
      });
    }
    if (p.alibi != nullptr) {
      each_row([&](Row row, int m, int x) {
        const TermRow terms = terms_of(row);
        const float distance = static_cast<float>(terms.position - first - lane() % 4 * 2);
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          scores[m][n][x] -= terms.slope * fabsf(distance - static_cast<float>(n * 8));
          scores[m][n][x + 1] -= terms.slope * fabsf(distance - static_cast<float>(n * 8 + 1));
        }
      });
    }
    if (p.bool_mask.data != nullptr) {
      each_row([&](Row row, int m, int x) {
        const TermRow terms = terms_of(row);
        const auto hide = [&](int n, bool first_hidden, bool second_hidden) {
          if (first_hidden) scores[m][n][x] = -kInfinity;
          if (second_hidden) scores[m][n][x + 1] = -kInfinity;
        };
        if (inside && p.mask_pairs) {
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            const uint32_t two =
                *reinterpret_cast<const uint16_t*>(terms.mask + first + n * 8 + lane() % 4 * 2);
            hide(n, (two & 0xff) == 0, two >> 8 == 0);
          }
        } else {
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            const int key = first + n * 8 + lane() % 4 * 2, last = place_.s.kv_len - 1;
            hide(n, terms.mask[min(key, last)] == 0, terms.mask[min(key + 1, last)] == 0);
            one_at_a_time();
          }
        }
      });
    }
  }

  // Keeps what seldom paths read from being fetched all at once, into registers that others need.
  static __device__ __forceinline__ void one_at_a_time() { asm volatile("" ::: "memory"); }

  template <int kN, typename Map>
  static __device__ __forceinline__ void each_score(ptx::Fragment (&scores)[kM][kN], Map map) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int x = 0; x < 4; ++x) scores[m][n][x] = map(scores[m][n][x]);
      }
    }
  }

  // Of rows past the last too, which must not be asked for what lies outside the tensors.
  __device__ __forceinline__ TermRow terms_of(Row row) const {
    const bool real = row.head < a_.p.group && row.i < place_.s.q_len;
    const int head = place_.head_kv * a_.p.group + (real ? row.head : 0);
    return term_row<T>(a_.p, place_.s, place_.b, head, real ? row.i : 0);
  }

  template <int kN>
  __device__ __forceinline__ void drop(ptx::Fragment (&weights)[kM][kN], int first) const {
    each_row([&](Row row, int m, int x) {
      const int head = place_.b * a_.p.head_q + place_.head_kv * a_.p.group + row.head;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float2 keep = keep_two(a_.p, head, row.i, first + n * 8 + lane() % 4 * 2);
        weights[m][n][x] *= keep.x;
        weights[m][n][x + 1] *= keep.y;
      }
    });
  }

  __device__ __forceinline__ void store() {
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      const int row = row_in_tile(r);
      const float sum = softmax_.sum[r], inverse = sum == 0 ? 0.0f : 1.0f / sum;
      if constexpr (sizeof(T) == 4) {
        if (row < place_.rows) {
          tile::store_row(out_row(row), out_[r / 2], r % 2 * 2, inverse, a_.p.dim_v, a_.vector_out);
        }
      } else {
        stage_row(r, inverse);
      }
      if (a_.lse.data != nullptr && lane() % 4 == 0 && row < place_.rows) {
        const Row which = place_.span.of(place_.s, row);
        const int head = place_.head_kv * a_.p.group + which.head;
        a_.lse.data[place_.s.batch_at * a_.lse.batch + head * a_.lse.head +
                    (place_.s.q_row + which.i) * a_.lse.row] =
            sum == 0 ? -kInfinity : (softmax_.reference[r] + log2f(sum)) * kLn2;
      }
    }
    if constexpr (sizeof(T) == 2) {
      __syncwarp();  // a warp stores the rows that it staged
      store_staged();
    }
  }

  __device__ __forceinline__ T* out_row(int row) const {
    const Row which = place_.span.of(place_.s, row);
    return rows_at<T>(a_.out, place_.s, place_.s.q_row + which.i,
                      place_.head_kv * a_.p.group + which.head);
  }

  // 16-bit outputs pass through the shared memory of Q, to be written 16 bytes at a time.
  __device__ __forceinline__ void stage_row(int r, float scale) {
#pragma unroll
    for (int d = 0; d < kOut; ++d) {
      const uint32_t two =
          ptx::pack<T>(out_[r / 2][d][r % 2 * 2] * scale, out_[r / 2][d][r % 2 * 2 + 1] * scale);
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(s_q_ + TileOut::offset(row_in_tile(r), d) +
                                                   lane() % 4 * 4),
                   "r"(two)
                   : "memory");
    }
  }

  __device__ __forceinline__ void store_staged() const {
    constexpr int kRowsOfWarp = 16 * kM;
    for (int x = lane(); x < kRowsOfWarp * TileOut::kChunks; x += 32) {
      const int row = warp() * kRowsOfWarp + x / TileOut::kChunks, chunk = x % TileOut::kChunks;
      if (row >= place_.rows || chunk * 8 >= a_.p.dim_v) continue;
      uint4 words;
      asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                   : "r"(s_q_ + TileOut::offset(row, chunk)));
      T* const to = out_row(row) + chunk * 8;
      if (a_.vector_out) {
        *reinterpret_cast<uint4*>(to) = words;
      } else {
        const uint32_t w[4] = {words.x, words.y, words.z, words.w};
        for (int y = 0; y < 8 && chunk * 8 + y < a_.p.dim_v; ++y) {
          reinterpret_cast<uint16_t*>(to)[y] = static_cast<uint16_t>(w[y / 2] >> (y % 2 * 16));
        }
      }
    }
  }

  // Rows of partial results: [part][KV head][row of the group].
  __device__ __forceinline__ int64_t partial_index() const {
    const int64_t all = static_cast<int64_t>(a_.p.group) * a_.p.q_len;
    const int64_t heads = int64_t{a_.batch} * a_.p.head_kv;
    return (blockIdx.y * heads + place_.b * a_.p.head_kv + place_.head_kv) * all + place_.row;
  }
  __device__ __forceinline__ float* partial_row() const {
    return a_.partial + partial_index() * a_.p.dim_v;
  }

  // Unnormalised sums, their reference max and sum of weights, for the merge.
  __device__ __forceinline__ void store_partial() {
    const int64_t first = partial_index();
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      const int row = row_in_tile(r);
      if (row >= place_.rows) continue;
      float* const to = partial_row() + static_cast<int64_t>(row) * a_.p.dim_v;
#pragma unroll
      for (int d = 0; d < kOut; ++d) {
        const int col = d * 8 + lane() % 4 * 2;
        if (col < a_.p.dim_v) to[col] = out_[r / 2][d][r % 2 * 2];
        if (col + 1 < a_.p.dim_v) to[col + 1] = out_[r / 2][d][r % 2 * 2 + 1];
      }
      if (lane() % 4 == 0) {
        a_.partial_stats[first + row] = make_float2(softmax_.reference[r], softmax_.sum[r]);
      }
    }
  }

  const ForwardArguments& a_;
  ForwardPlace& place_;
  const uint32_t s_q_, s_k_, s_v_;
  uint32_t q_[kM][kC.q_in_registers ? kC.dim_qk / 16 : 1][4];
  bool settled_;  // every row has a reference
  RunningSoftmax<kM> softmax_;
  ptx::Fragment out_[kM][kOut];
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kConfig.threads(), Shape::kConfig.blocks)
    forward_kernel(const __grid_constant__ ForwardArguments a) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ ForwardPlace place;
  ForwardBlock<Shape>(a, place, ptx::shared_address(memory)).run();
}

}  // namespace fovea::cuda
