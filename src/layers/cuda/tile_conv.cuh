// Convolutions of small heads by blocks of threads that take a tile of tokens and some of the
// heads, with three taps and the weights in shared memory.
//
// In memory the taps of a weight are innermost, [out][in][tap]. On their way they are set apart,
// [tap][out][in], so that each tap's are operands of tensor cores forward and, transposed,
// backward; the rows that a tap multiplies are the same tile from a row further on.
#pragma once

#include "layers/cuda/fixed_angles.cuh"
#include "layers/cuda/tokens.cuh"
#include "prim/cuda/ptx/cp_async.cuh"
#include "prim/cuda/ptx/ldmatrix.cuh"
#include "prim/cuda/ptx/mma.cuh"

namespace fovea::layers::cuda {

constexpr int kTileThreads = 512, kTileWarps = kTileThreads / 32;
constexpr int kTileTokens = 64;
constexpr int kTileTaps = 3;
constexpr int kTileDim = 16;       // of heads
constexpr int kTileNearRows = 82;  // with those that taps reach, whole fragments
constexpr int kTilePadding = 8;    // elements between rows: ldmatrix's lie in different banks
constexpr int kTilePairs = kTileDim / 2;

// Shared memory of blocks that take few heads each, and of those that take all.
template <bool kFew>
constexpr int kTileSharedBytes = (kFew ? 144 : 220) * 1024;

// The weights of one convolution, of q or of k, that a block holds.
struct TileWeight {
  const void* weight = nullptr;  // [channels, inputs, taps]
  int row_eights = 0;            // eights of inputs in memory
  int rows = 0;                  // outputs that a block holds, and eights of inputs
  Divider eights;
  int row_step = 0, eight_step = 0;  // from one block's to the next one's
  int offset = 0;                    // in shared memory, bytes

  __host__ __device__ int pitch() const { return static_cast<int>(eights.by) * 8 + kTilePadding; }
  __host__ __device__ int tap_size() const { return rows * pitch(); }
  __host__ __device__ int items() const { return rows * static_cast<int>(eights.by); }
  int bytes() const { return kTileTaps * tap_size() * 2; }
};

// Of both convolutions: the second one's of q, where most of the work is, and of k; then the
// first one's.
struct TileWeights {
  TileWeight of[4];

  __device__ __forceinline__ const TileWeight& first(bool is_k) const { return of[2 + is_k]; }
  __device__ __forceinline__ const TileWeight& second(bool is_k) const { return of[is_k]; }
};

// Eight inputs of an output with their taps, on their way.
struct WeightsOnTheWay {
  uint4 word[3];
  uint32_t to = 0, tap_bytes = 0;  // 0: none

  __device__ __forceinline__ void fetch(const TileWeights& weights, int item, int part,
                                        uint32_t s_memory) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const TileWeight& w = weights.of[n];
      if (item < w.items()) {
        const int row = w.eights(item), eight = item - row * static_cast<int>(w.eights.by);
        const int from = (row + part * w.row_step) * w.row_eights + eight + part * w.eight_step;
        const uint4* const words = static_cast<const uint4*>(w.weight) + from * 3;
#pragma unroll
        for (int i = 0; i < 3; ++i) word[i] = __ldg(words + i);
        to = s_memory + w.offset + (row * w.pitch() + eight * 8) * 2;
        tap_bytes = w.tap_size() * 2;
        return;
      }
      item -= w.items();
    }
  }
  // Three words hold both inputs of a pair: taps 0 and 1 of the first, its last and 0 of the
  // second, whose others follow.
  __device__ __forceinline__ void put() const {
    if (tap_bytes == 0) return;
    const uint32_t x[12] = {word[0].x, word[0].y, word[0].z, word[0].w, word[1].x, word[1].y,
                            word[1].z, word[1].w, word[2].x, word[2].y, word[2].z, word[2].w};
    uint32_t tap[kTileTaps][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      tap[0][i] = __byte_perm(x[3 * i], x[3 * i + 1], 0x7610);
      tap[1][i] = __byte_perm(x[3 * i], x[3 * i + 2], 0x5432);
      tap[2][i] = __byte_perm(x[3 * i + 1], x[3 * i + 2], 0x7610);
    }
#pragma unroll
    for (int j = 0; j < kTileTaps; ++j) {
      asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to + j * tap_bytes),
                   "r"(tap[j][0]), "r"(tap[j][1]), "r"(tap[j][2]), "r"(tap[j][3])
                   : "memory");
    }
  }
};

// By all threads of a block, of which this is part `part` of those that share a tile.
__device__ __forceinline__ void load_weights(const TileWeights& weights, int part,
                                             std::byte* s_memory) {
  constexpr int kAtOnce = 3;
  const int items =
      weights.of[0].items() + weights.of[1].items() + weights.of[2].items() + weights.of[3].items();
#pragma unroll 1
  for (int i = threadIdx.x; i < items; i += kAtOnce * kTileThreads) {
    WeightsOnTheWay some[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      some[n].fetch(weights, i + n * kTileThreads, part, ptx::shared_address(s_memory));
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) some[n].put();
  }
}

// sum[m][n] = 16 kM rows, of which s_x is the first, times 16 channels, over taps and 16 `chunks`
// inputs. Backward, rows of weights are what is summed over, and later rows meet earlier taps.
template <typename T, bool kBackward, int kM>
__device__ __forceinline__ void multiply_taps(ptx::Fragment (&sum)[kM][2], const T* s_x, int pitch,
                                              const T* s_weight, int weight_pitch, int tap_size,
                                              int chunks) {
  constexpr int kChains = kM == 1 ? kTileTaps : 1;  // sums that do not wait for each other
  const int lane = threadIdx.x % 32;
  const uint32_t x = ptx::shared_address(s_x + lane % 16 * pitch + lane / 16 * 8);
  const int row = kBackward ? lane % 16 : lane % 8 + lane / 16 * 8;
  const int col = kBackward ? lane / 16 * 8 : lane / 8 % 2 * 8;
  uint32_t a_at[kTileTaps], b_at[kTileTaps];
#pragma unroll
  for (int tap = 0; tap < kTileTaps; ++tap) {
    a_at[tap] = x + (kBackward ? kTileTaps - 1 - tap : tap) * pitch * 2;
    b_at[tap] = ptx::shared_address(s_weight + tap * tap_size + row * weight_pitch + col);
  }
  const int b_step = kBackward ? weight_pitch * 32 : 32;
  ptx::Fragment part[kChains][kM][2] = {};
#pragma unroll(kM == 1 ? 2 : 1)
  for (int k = 0; k < chunks; ++k) {
#pragma unroll
    for (int tap = 0; tap < kTileTaps; ++tap) {
      uint32_t a[kM][4], b[4];
      kBackward ? ptx::ldmatrix_x4_trans(b, b_at[tap]) : ptx::ldmatrix_x4(b, b_at[tap]);
#pragma unroll
      for (int m = 0; m < kM; ++m) ptx::ldmatrix_x4(a[m], a_at[tap] + m * 32 * pitch);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        ptx::mma_m16n8k16<T>(part[tap % kChains][m][0], a[m], b[0], b[1]);
        ptx::mma_m16n8k16<T>(part[tap % kChains][m][1], a[m], b[2], b[3]);
      }
      a_at[tap] += 32;
      b_at[tap] += b_step;
    }
  }
#pragma unroll
  for (int i = 0; i < kM * 8; ++i) {
    float total = part[0][i / 8][i / 4 % 2][i % 4];
#pragma unroll
    for (int c = 1; c < kChains; ++c) total += part[c][i / 8][i / 4 % 2][i % 4];
    sum[i / 8][i / 4 % 2][i % 4] = total;
  }
}

// The heads of a tile that a block takes: some of q's, one after the other, and every so many of
// k's.
struct TileHeads {
  int shift = 0;  // 1 << shift blocks share a tile
  int heads = 0, heads_kv = 0, own_q = 0;

  __host__ __device__ int parts() const { return 1 << shift; }
  __device__ __forceinline__ int own_k(int part) const {
    return (heads_kv - part + parts() - 1) >> shift;
  }
  __device__ __forceinline__ int head(int part, int n) const {
    return n < own_q ? part * own_q + n : heads + part + ((n - own_q) << shift);
  }
  __device__ __forceinline__ bool owns(int part, int head) const {
    if (head >= heads) return ((head - heads) & (parts() - 1)) == part;
    return head >= part * own_q && head < (part + 1) * own_q;
  }
};

// use(head, nth, row) with every head of a block, its nth, and every kRows rows of the first
// kPieces * kRows of a tile, in turn to each warp. Gives how many such units there are.
template <int kPieces, int kRows, typename Use>
__device__ __forceinline__ int over_heads(const TileHeads& heads, int part, const Use& use) {
  const int units = (heads.own_q + heads.own_k(part)) * kPieces;
#pragma unroll 1
  for (int unit = threadIdx.x / 32; unit < units; unit += kTileWarps) {
    const int head = heads.head(part, unit / kPieces);
    use(head, unit / kPieces, unit % kPieces * kRows);
  }
  return units;
}

// What a head gets from others by the coupling: `weight` times the sum of `count` heads, and `own`
// times itself.
struct HeadShare {
  int first = 0, count = 0;
  float weight = 0, own = 0;

  __device__ __forceinline__ HeadShare(const Coupling& c, int head) {
    if (c.kind == Coupled::kNone) return;
    const bool is_q = head < c.heads;
    weight = is_q ? c.from_k : c.from_q;
    first = is_q ? c.heads : 0;
    count = is_q ? c.heads_kv : c.heads;
    if (c.kind == Coupled::kAllHeads) return;
    const int group = c.heads / c.heads_kv;
    weight *= 0.5f;
    own = 0.5f;
    first += is_q ? head / group : (head - c.heads) * group;
    count = is_q ? 1 : group;
  }

  // Adds it to the fragments of a head: of rows from s_rows on.
  template <typename T, int kM>
  __device__ __forceinline__ void add_to(ptx::Fragment (&sum)[kM][2], const T* s_rows, int pitch,
                                         int head) const {
    const int lane = threadIdx.x % 32;
    const T* const s_own = s_rows + lane / 4 * pitch + lane % 4 * 2;
    const auto add_head = [&](int from, float factor) {
#pragma unroll
      for (int i = 0; i < kM * 4; ++i) {  // fragments, and their halves of eight rows
        const int m = i / 4, y = i / 2 % 2, n = i % 2;
        const float2 x = ptx::unpack<T>(*reinterpret_cast<const uint32_t*>(
            s_own + (m * 16 + y * 8) * pitch + from * kTileDim + n * 8));
        sum[m][n][2 * y] = fmaf(factor, x.x, sum[m][n][2 * y]);
        sum[m][n][2 * y + 1] = fmaf(factor, x.y, sum[m][n][2 * y + 1]);
      }
    };
#pragma unroll 1
    for (int n = 0; n < count; ++n) add_head(first + n, weight);
    if (own != 0) add_head(head, own);
  }
};

// One over a head's length; see longest().
__device__ __forceinline__ float inverse_length(float squares) {
  return fminf(rsqrtf(squares), 1 / kShortest);
}

// use(item) with every item that is this thread's: of the warps that had none of `units`, or where
// those are too few, of all, beginning with the last.
template <typename Use>
__device__ __forceinline__ void over_items(int units, int items, const Use& use) {
  constexpr int kEnough = 4;  // warps
  const int first = units + kEnough <= kTileWarps ? units * 32 : 0;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < first) return;
#pragma unroll 1
  for (int i = kTileThreads - 1 - thread; i < items; i += kTileThreads - first) use(i);
}

// RoPE of heads of which all channels turn, or that turn in neighbouring pairs.
struct TileTurns {
  bool half = false;
  uint64_t step[kTilePairs] = {};  // as FixedAngles'; 0: does not turn
  const int32_t* ids = nullptr;
  int64_t ids_batch = 0, ids_row = 0, first = 0;  // as Rotation's

  static bool takes(const Rotation& r) {
    return !r.half || r.turning == 0 || r.turning == kTileDim;
  }
  static TileTurns of(const Rotation& r) {
    TileTurns t;
    t.half = r.half;
    for (int i = 0; i < r.turning / 2; ++i) {
      t.step[i] = fixed_angle(std::exp2(static_cast<long double>(i * r.log2_step)));
    }
    t.ids = r.ids;
    t.ids_batch = r.ids_batch;
    t.ids_row = r.ids_row;
    t.first = r.first;
    return t;
  }

  // cos and sin of every pair of some tokens, to [rows][pairs].
  __device__ __forceinline__ void fill(float2* s_angles, int rows, int b, int token,
                                       int q_len) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * kTilePairs; i += kTileThreads) {
      const int r = i / kTilePairs, at = token + r;
      if (at >= q_len) return;
      const Angle angle = angle_at(step[i % kTilePairs],
                                   ids != nullptr ? ids[b * ids_batch + at * ids_row] : first + at);
      s_angles[i] = {angle.cosine, angle.sine};
    }
  }
};

}  // namespace fovea::layers::cuda
