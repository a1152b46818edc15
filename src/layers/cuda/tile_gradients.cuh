// Gradients of the weights of layers that are taken by tiles, in one kernel:
//
//   dw[o][i][tap] = sum over rows r of dy[r][o] * x[r + tap][i]
//
// A cluster of blocks makes 32 by 32 of a convolution's weights with all their taps. Its blocks
// take turns with the rows, and then add their sums in order, each some of the weights.
#pragma once

#include "layers/cuda/tile_conv.cuh"
#include "prim/cuda/ptx/cluster.cuh"

namespace fovea::layers::cuda {

constexpr int kSliceBlocks = 8;     // of a cluster
constexpr int kSliceThreads = 256;  // warps stand two across, by four of 16 rows
constexpr int kSlice = 32;          // outputs and inputs
constexpr int kSliceRows = 64;      // at a time
constexpr int kSliceStages = 6;
constexpr int kSlicePitch = kSlice + kTilePadding;
constexpr int kSumPitch = kSlice * kTileTaps + 4;  // floats of an output
constexpr int kSliceStageRows = 2 * kSliceRows + kTileTaps - 1;
constexpr int kSliceStageBytes = kSliceStageRows * kSlicePitch * 2;
constexpr int kSliceSharedBytes = kSliceStages * kSliceStageBytes;
static_assert(kSliceSharedBytes >= 4 * kSlice * kSumPitch * 4, "sums of four warps lie there too");

// Of one weight.
struct TileGradient {
  void* to = nullptr;
  int first = 0, channels = 0, group = 0;
  Rows dy, x;
  int rows = 0, chunks = 0;  // of dy in a member of the batch; of all, in pieces
  Divider chunks_of_member;
  int across = 1, slices = 0;  // slices of inputs for one of outputs; groups are within a slice
};

struct TileGradients {
  int blocks = 0;
  TileGradient of[4];
  const float* slopes = nullptr;  // [tiles, heads_kv]: what the temperature's gradient sums
  void* temperature = nullptr;    // [1] or [heads_kv]
  int temperatures = 0, slope_count = 0;
};

// Sums over all tiles, by a warp.
template <typename T>
__device__ __forceinline__ void add_slopes(const TileGradients& a) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int g = 0; g < a.temperatures; ++g) {
    float sum = 0;
#pragma unroll 4
    for (int i = g + lane * a.temperatures; i < a.slope_count; i += 32 * a.temperatures) {
      sum += a.slopes[i];
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) static_cast<T*>(a.temperature)[g] = ptx::from_float<T>(sum);
  }
}

// Brings the rows of a block's chunks, one after the other: 64 of dy and as many of x, a piece of
// 16 bytes of each to a thread, and the rows of x that taps reach beyond. What every chunk needs is
// in registers: a gradient's arguments lie where its number says, which takes long to read.
template <typename T>
class ChunkLoader {
 public:
  // From `chunk` on, every kSliceBlocks-th.
  __device__ __forceinline__ ChunkLoader(const TileGradient& a, int out, int in, int chunk,
                                         uint32_t s_stages)
      : a_(a), row_(threadIdx.x / 4), whole_(a.rows / kSliceRows) {
    const RowAt at(chunk, a.chunks_of_member);
    const int begin = at.r * kSliceRows + row_, piece = threadIdx.x % 4 * 8;
    chunk_ = at.r;
    chunks_ = static_cast<int>(a.chunks_of_member.by);
    take_dy_ = out + piece < a.channels;
    take_x_ = in + piece < a.channels;
    dy_ = a.dy.at<const T>(at.b, begin) + a.first + (take_dy_ ? out + piece : 0);
    x_ = a.x.at<const T>(at.b, begin) + a.first + (take_x_ ? in + piece : 0);
    dy_rows_ = kSliceRows * a.dy.row;
    x_rows_ = kSliceRows * a.x.row;
    to_ = s_stages + (row_ * kSlicePitch + piece) * 2;
  }

  // The next, to the stage at `offset`.
  __device__ __forceinline__ void load(int offset) {
    chunk_ < whole_ ? bring<true>(to_ + offset) : bring<false>(to_ + offset);
    dy_ += kSliceBlocks * dy_rows_;
    x_ += kSliceBlocks * x_rows_;
    chunk_ += kSliceBlocks;
    while (chunk_ >= chunks_) {  // on to the next member of the batch
      chunk_ -= chunks_;
      dy_ += a_.dy.batch - chunks_ * dy_rows_;
      x_ += a_.x.batch - chunks_ * x_rows_;
    }
  }

 private:
  // Of a chunk that is not whole the rows that there are, and zeros.
  template <bool kWhole>
  __device__ __forceinline__ void bring(uint32_t there) const {
    const int left = kWhole ? 0 : a_.rows - chunk_ * kSliceRows - row_;
    const auto piece = [&](int row, bool is, const T* from, const void* any) {
      ptx::cp_async_16(there + row * kSlicePitch * 2, kWhole || is ? from : any, is ? 16 : 0);
    };
    piece(0, take_dy_ && (kWhole || left > 0), dy_, a_.dy.data);
    piece(kSliceRows, take_x_ && (kWhole || left > 1 - kTileTaps), x_, a_.x.data);
    if (row_ >= kTileTaps - 1) return;
    piece(2 * kSliceRows, take_x_ && (kWhole || left > kSliceRows + 1 - kTileTaps), x_ + x_rows_,
          a_.x.data);
  }

  const TileGradient& a_;
  int row_, chunk_, chunks_, whole_;  // the thread's; in the member, of all, of which are whole
  bool take_dy_, take_x_;
  const T *dy_, *x_;
  int64_t dy_rows_, x_rows_;  // from chunk to chunk
  uint32_t to_;
};

// 32 outputs by 16 inputs of a warp, over its 16 rows of a chunk.
template <typename T>
struct SliceRows {
  uint32_t s_dy, s_x;  // of the lane, in the first stage

  __device__ __forceinline__ explicit SliceRows(uint32_t s_stages) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp / 2 * 16;
    s_dy = s_stages + ((row + lane % 8 + lane / 16 * 8) * kSlicePitch + lane / 8 % 2 * 8) * 2;
    s_x = s_stages +
          ((kSliceRows + row + lane % 16) * kSlicePitch + warp % 2 * 16 + lane / 16 * 8) * 2;
  }
  __device__ __forceinline__ void add_to(ptx::Fragment (&sum)[kTileTaps][2][2], int offset) const {
    uint32_t a[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) ptx::ldmatrix_x4_trans(a[m], s_dy + offset + m * 32);
#pragma unroll
    for (int tap = 0; tap < kTileTaps; ++tap) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, s_x + offset + tap * kSlicePitch * 2);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        ptx::mma_m16n8k16<T>(sum[tap][m][0], a[m], b[0], b[1]);
        ptx::mma_m16n8k16<T>(sum[tap][m][1], a[m], b[2], b[3]);
      }
    }
  }
};

// The sums of a block's warps to [output][input][tap].
__device__ __forceinline__ void add_warps(const ptx::Fragment (&sum)[kTileTaps][2][2],
                                          float* s_sums) {
  constexpr int kPart = kSlice * kSumPitch;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* const own =
      s_sums + warp / 2 * kPart + lane / 4 * kSumPitch + (warp % 2 * 16 + lane % 4 * 2) * kTileTaps;
#pragma unroll
  for (int i = 0; i < kTileTaps * 16; ++i) {
    const int tap = i / 16, m = i / 8 % 2, n = i / 4 % 2, y = i / 2 % 2, e = i % 2;
    own[(m * 16 + y * 8) * kSumPitch + (n * 8 + e) * kTileTaps + tap] = sum[tap][m][n][2 * y + e];
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x * 4; i < kPart; i += kSliceThreads * 4) {
    float4* const at = reinterpret_cast<float4*>(s_sums + i);
    float4 total = *at;
#pragma unroll
    for (int part = 1; part < 4; ++part) {
      const float4 x = at[part * kPart / 4];
      total = {total.x + x.x, total.y + x.y, total.z + x.z, total.w + x.w};
    }
    *at = total;
  }
}

// What the cluster's blocks have, added in order; every block stores the outputs that are its own.
template <typename T>
__device__ __forceinline__ void add_blocks(const TileGradient& a, int rank, int out, int in,
                                           const float* s_sums) {
  constexpr int kOwn = kSlice / kSliceBlocks, kPairs = kSlice * kTileTaps / 2;
  const int o = rank * kOwn + static_cast<int>(threadIdx.x) / kPairs;  // of the slice
  const int pair = threadIdx.x % kPairs, i = 2 * pair / kTileTaps;
  if (static_cast<int>(threadIdx.x) >= kOwn * kPairs) return;
  const uint32_t here = ptx::shared_address(s_sums + o * kSumPitch + 2 * pair);
  float2 total{};
#pragma unroll
  for (int block = 0; block < kSliceBlocks; ++block) {
    const float2 x = ptx::load_in_cluster(ptx::shared_address_of(here, block));
    total = {total.x + x.x, total.y + x.y};
  }
  const int low = (out + o) / a.group * a.group, local = in + i - low;
  if (out + o >= a.channels || local < 0 || local >= a.group) return;
  T* const to = static_cast<T*>(a.to) + int64_t{out + o} * a.group * kTileTaps +
                (in - low) * kTileTaps + 2 * pair;
  *reinterpret_cast<uint32_t*>(to) = ptx::pack<T>(total.x, total.y);
}

template <typename T>
__global__ void FOVEA_IN_CLUSTERS_OF(8) __launch_bounds__(kSliceThreads, 2)
    tile_gradients_kernel(const __grid_constant__ TileGradients all) {
  extern __shared__ __align__(128) std::byte shared[];
  const uint32_t s_stages = ptx::shared_address(shared);
  const bool adds_slopes =
      all.temperature != nullptr && blockIdx.x + 1 == gridDim.x && threadIdx.x < 32;
  int slice = static_cast<int>(blockIdx.x) / kSliceBlocks, n = 0;
  while (n < 4 && slice >= all.of[n].slices) slice -= all.of[n++].slices;
  if (n == 4) {  // no weights at all
    ptx::wait_for_earlier_kernels();
    if (adds_slopes) add_slopes<T>(all);
    return;
  }
  const TileGradient& a = all.of[n];
  const int rank = static_cast<int>(blockIdx.x) % kSliceBlocks;
  const bool grouped = a.group < kSlice;
  const int out = (grouped ? slice : slice / a.across) * kSlice;
  const int in = (grouped ? slice : slice % a.across) * kSlice;

  const int count = (a.chunks - rank + kSliceBlocks - 1) / kSliceBlocks;
  ChunkLoader<T> loader(a, out, in, rank, s_stages);
  int to_load = count;
  const auto load = [&](int offset) {
    if (to_load-- > 0) loader.load(offset);
    ptx::cp_async_commit();
  };
  ptx::wait_for_earlier_kernels();
#pragma unroll 1
  for (int i = 0; i < kSliceStages - 1; ++i) load(i * kSliceStageBytes);
  if (adds_slopes) add_slopes<T>(all);  // while rows are on their way
  const SliceRows<T> rows(s_stages);
  ptx::Fragment sum[kTileTaps][2][2] = {};
  int offset = 0, before = (kSliceStages - 1) * kSliceStageBytes;  // of stages
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    ptx::cp_async_wait<kSliceStages - 2>();
    __syncthreads();
    load(before);
    rows.add_to(sum, offset);
    before = offset;
    offset = offset + kSliceStageBytes == kSliceSharedBytes ? 0 : offset + kSliceStageBytes;
  }
  ptx::cp_async_wait<0>();
  __syncthreads();
  float* const s_sums = reinterpret_cast<float*>(shared);
  ptx::let_next_kernel_begin();  // x's gradient, with its weight on the way
  add_warps(sum, s_sums);
  ptx::cluster_sync();
  add_blocks<T>(a, rank, out, in, s_sums);
  ptx::cluster_sync();  // others may read this block's
}

}  // namespace fovea::layers::cuda
