// Convolutions of few channels by two blocks of threads that share the rows and make half of the
// channels each, holding the weights for these in shared memory as they lie in memory.
//
// There the taps of a weight are innermost, [out][in][tap], so that a row of weights is an operand
// of tensor cores whose depth is all inputs with all taps. Forward, rows are spread out to match,
// x[r][in][tap] = row r + tap; backward, sums come with the taps apart and are gathered:
//
//   y[r][in] = sum over tap of p[r + taps - 1 - tap][in][tap],  p[r][in][tap] = sum over out of
//                                                               x[r][out] w[out][in][tap]
#pragma once

#include "layers/cuda/tokens.cuh"
#include "prim/cuda/ptx/cluster.cuh"
#include "prim/cuda/ptx/cp_async.cuh"
#include "prim/cuda/ptx/ldmatrix.cuh"
#include "prim/cuda/ptx/mma.cuh"

namespace fovea::layers::cuda {

constexpr int kPairThreads = 512, kPairWarps = kPairThreads / 32;
constexpr int kPairRows = 32;      // of two blocks
constexpr int kPairNearRows = 48;  // with those that a convolution reaches, whole fragments
constexpr int kMostPairTaps = 9;   // both convolutions' then reach 16 rows
constexpr int kPairSharedBytes = 220 * 1024;
constexpr int kPairPadding = 8;  // elements between rows: ldmatrix's lie in different banks

// A part of a convolution's channels: q's, or k's.
struct PairBlock {
  int first = 0, channels = 0, group = 0;
  const void* weight = nullptr;    // [channels, group, taps]
  int offset = 0;                  // in shared memory, bytes
  int rows = 0, cols = 0;          // of the weight as a matrix, that a block holds
  int row_step = 0, col_step = 0;  // to those of the other block
  Divider pieces;                  // of 16 bytes in a row of them
  Divider by_group, by_inputs;     // a group's channels; the same with their taps

  __device__ __forceinline__ int pitch() const { return cols + kPairPadding; }
  __device__ __forceinline__ int own() const { return channels / 2; }
};

struct PairConv {
  int taps = 1, blocks = 0;
  PairBlock block[2];
};

// use(block, its first channel of the own ones, unit) with every unit that is this warp's, of which
// a part of the channels has units_of(block).
template <typename UnitsOf, typename Use>
__device__ __forceinline__ void over_units(const PairConv& conv, const UnitsOf& units_of,
                                           const Use& use) {
  const int of_first = units_of(conv.block[0]);
  const int all = of_first + (conv.blocks > 1 ? units_of(conv.block[1]) : 0);
#pragma unroll 1
  for (int unit = threadIdx.x / 32; unit < all; unit += kPairWarps) {
    const bool second = unit >= of_first;
    use(conv.block[second], second ? conv.block[0].own() : 0, second ? unit - of_first : unit);
  }
}

// This block of the two.
struct Pair {
  int rank = 0;
  uint32_t to_other = 0;  // from an address here to the same of the other

  __device__ __forceinline__ explicit Pair(const std::byte* shared)
      : rank(static_cast<int>(blockIdx.x % 2)) {
    const uint32_t here = ptx::shared_address(shared);
    to_other = ptx::shared_address_of(here, rank ^ 1) - here;
  }
  // To the same place in the shared memory of both.
  template <typename Word>
  __device__ __forceinline__ void store(void* shared, const Word& x) const {
    *static_cast<Word*>(shared) = x;
    ptx::store_in_cluster(ptx::shared_address(shared) + to_other, x);
  }
};

// Begins to bring weights; threads of the block all come.
template <typename T>
__device__ void load_weights(const PairConv& conv, std::byte* s_memory, int rank) {
#pragma unroll 1
  for (int n = 0; n < conv.blocks; ++n) {
    const PairBlock& b = conv.block[n];
    const uint32_t s_weight = ptx::shared_address(s_memory) + b.offset;
    const int pieces = static_cast<int>(b.pieces.by), row_bytes = b.pitch() * 2;
    const int length = b.group * conv.taps;
    const T* const from =
        static_cast<const T*>(b.weight) + int64_t{rank} * (b.row_step * length + b.col_step);
#pragma unroll 2
    for (int i = threadIdx.x; i < b.rows * pieces; i += kPairThreads) {
      const int row = b.pieces(i), piece = i - row * pieces;
      ptx::cp_async_16(s_weight + row * row_bytes + piece * 16, from + row * length + piece * 8);
    }
  }
}

// sum[m][n] += 16 kM rows of `a` times 16 columns, over `steps` times 16 of depth. kDeep: the depth
// is along the rows of `b`, otherwise along its columns.
template <typename T, bool kDeep, int kM>
__device__ __forceinline__ void multiply_tile(ptx::Fragment (&sum)[kM][2], const T* s_a,
                                              int pitch_a, const T* s_b, int pitch_b, int steps) {
  const int lane = threadIdx.x % 32;
  uint32_t a_at = ptx::shared_address(s_a + lane % 16 * pitch_a + lane / 16 * 8);
  uint32_t b_at =
      ptx::shared_address(kDeep ? s_b + lane % 16 * pitch_b + lane / 16 * 8
                                : s_b + (lane % 8 + lane / 16 * 8) * pitch_b + lane / 8 % 2 * 8);
  const int a_tile = pitch_a * 32, b_step = kDeep ? pitch_b * 32 : 32;
#pragma unroll 2
  for (int step = 0; step < steps; ++step) {
    uint32_t a[kM][4], b[4];
    kDeep ? ptx::ldmatrix_x4_trans(b, b_at) : ptx::ldmatrix_x4(b, b_at);
#pragma unroll
    for (int m = 0; m < kM; ++m) ptx::ldmatrix_x4(a[m], a_at + m * a_tile);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      ptx::mma_m16n8k16<T>(sum[m][0], a[m], b[0], b[1]);
      ptx::mma_m16n8k16<T>(sum[m][1], a[m], b[2], b[3]);
    }
    a_at += 32;
    b_at += b_step;
  }
}

// each(row, col, x, y) with the pairs of neighbouring values that a lane holds of a tile.
template <int kM, typename Each>
__device__ __forceinline__ void over_fragments(const ptx::Fragment (&sum)[kM][2],
                                               const Each& each) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int y = 0; y < 2; ++y) {
        each(m * 16 + y * 8 + lane / 4, n * 8 + lane % 4 * 2, sum[m][n][2 * y],
             sum[m][n][2 * y + 1]);
      }
    }
  }
}

// to[r][c][tap] = from[r + tap][c], of an even number of channels.
template <typename T>
__device__ __forceinline__ void spread_taps(T* s_to, int pitch_to, const T* s_from, int pitch_from,
                                            int rows, int channels, int taps) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int r = warp; r < rows; r += kPairWarps) {
#pragma unroll 1
    for (int c = lane * 2; c < channels; c += 64) {
      const T* const from = s_from + r * pitch_from + c;
      T* const to = s_to + r * pitch_to + c * taps;
      if (taps == 3) {
        const auto word = [&](int tap) {
          return *reinterpret_cast<const uint32_t*>(from + tap * pitch_from);
        };
        const uint32_t x = word(0), y = word(1), z = word(2);
        uint32_t* const words = reinterpret_cast<uint32_t*>(to);
        words[0] = __byte_perm(x, y, 0x5410);
        words[1] = __byte_perm(z, x, 0x7610);
        words[2] = __byte_perm(y, z, 0x7632);
        continue;
      }
#pragma unroll 1
      for (int tap = 0; tap < taps; ++tap) {
        to[tap] = from[tap * pitch_from];
        to[taps + tap] = from[tap * pitch_from + 1];
      }
    }
  }
}

// The columns of this block's channels among all of them, and among its own.
template <typename Use>
__device__ __forceinline__ void over_own_columns(const PairConv& conv, int rank, const Use& use) {
  int begin = 0;
#pragma unroll 1
  for (int n = 0; n < conv.blocks; ++n) {
    const PairBlock& b = conv.block[n];
    use(b.first + rank * b.own(), begin, b.own());
    begin += b.own();
  }
}

}  // namespace fovea::layers::cuda
