// The kernel of attention and its output's projection. A block attends for eight tokens near the
// beginning of a sequence and eight near its end, which together see as many keys in every block,
// and projects them to all columns. The weight comes meanwhile, to two blocks at a time: it is most
// of what a block reads.
//
// Exponents are products as they are, so that warps may share keys and add what they have. Where a
// sum shows that products were too large or too small for that, or outputs that a value which is
// not finite met a hidden key, the block does its work again, carefully.
#pragma once

#include <cstddef>

#include "backend/cuda/common/sequence.cuh"
#include "backend/cuda/common/weight_sums.cuh"
#include "layers/cuda/hopper/attended_output_parts.cuh"
#include "prim/cuda/ptx/cluster.cuh"
#include "prim/cuda/ptx/grid_dependency.cuh"
#include "prim/cuda/ptx/mbarrier.cuh"
#include "prim/cuda/ptx/tma.cuh"
#include "prim/cuda/tile/products.cuh"

namespace fovea::layers::cuda {

template <typename T>
class OutputBlock {
  using S = OutputShape;
  using Shared = OutputShared<T>;
  using Keys = typename Shared::Keys;

 public:
  __device__ __forceinline__ OutputBlock(const OutputArguments& a, Shared& s)
      : a_(a), s_(s), at_(static_cast<int>(blockIdx.x), a.pairs), tiles_(a, at_.r) {}

  // What can be is done before the wait: where things lie, and half of the weight. The other half
  // comes after the keys, which would have to wait for it.
  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(weight_is_there(), 1);
      ptx::mbarrier_init_fence();
    }
    ptx::cluster_sync();
    if (!a_.settled) ptx::wait_for_earlier_kernels();
    if (threadIdx.x == 0) ptx::mbarrier_arrive_expect(weight_is_there(), a_.columns * kWeightRow);
    load_weight(0);
    if (at_.b >= a_.batch) {  // the other of the cluster is the last one
      load_weight(1);
      ptx::mbarrier_wait(weight_is_there(), 0);
      ptx::wait_for_earlier_kernels();
      return;
    }
    find_inputs();
    ptx::wait_for_earlier_kernels_with(keys_[0], keys_[1], q_at_[1]);
    load_queries();
    load_keys();
    load_weight(1);
    int chunk = warp() % S::kShares;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const bool all = half == 1;
      if (all) {
        ptx::cp_async_wait<0>();
      } else {
        ptx::cp_async_wait<1>();
      }
      __syncthreads();
      attend(chunk, (all ? S::kMostKeys : S::kSoonKeys) / 16);
    }
    ptx::mbarrier_wait(weight_is_there(), 0);
    read_weight();    // while others are still at it
    __syncthreads();  // keys have been read
    set_parts();
    __syncthreads();
    gather();
    __syncthreads();
    keep_heads();
    project();
  }

 private:
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int group() { return lane() / 4; }  // a token, of a fragment
  // Of attention: two heads to four warps.
  static __device__ __forceinline__ int head() { return warp() / S::kShares * 2; }

  __device__ __forceinline__ uint32_t weight_is_there() const {
    return ptx::shared_address(&s_.weight_is_there);
  }

  static constexpr int kWeightRow = S::kWidth * int{sizeof(T)};  // bytes

  // A half of the rows: each of its warps asks for some, for both blocks of the cluster.
  __device__ __forceinline__ void load_weight(int half) const {
    constexpr int kRows = S::kMostColumns / S::kBlocks / S::kWarps;
    const int rank = static_cast<int>(blockIdx.x) % S::kBlocks;
    const int first = (rank * S::kWarps + warp()) * kRows;
    if (lane() != 0 || warp() / (S::kWarps / 2) != half || first >= a_.columns) return;
    ptx::bulk_load_to_cluster(ptx::shared_address(s_.weight) + first * kWeightRow,
                              static_cast<const std::byte*>(a_.weight) + first * kWeightRow,
                              min(kRows, a_.columns - first) * kWeightRow, weight_is_there(),
                              (1 << S::kBlocks) - 1);
  }

  // Of the first key and the queries that this thread loads.
  __device__ __forceinline__ void find_inputs() {
    const int key = min(first_key(), a_.q_len - 1), col = piece() * 8;
    keys_[0] = a_.k.at<T>(at_.b, key) + col;
    keys_[1] = a_.v.at<T>(at_.b, key) + col;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      q_at_[t] = a_.q.at<T>(at_.b, tiles_.has(t, group()) ? tiles_.first(t) + group() : 0) +
                 head() * S::kDim + lane() % 4 * 2;
    }
  }

  // A key has two pieces of 16 bytes to a head.
  __device__ __forceinline__ int first_key() const { return threadIdx.x >> a_.kv_heads; }
  __device__ __forceinline__ int piece() const { return threadIdx.x & ((1 << a_.kv_heads) - 1); }

  // All keys that the later tile sees; those past the last are zeros.
  __device__ __forceinline__ void load_keys() const {
    const int end = tiles_.first(1) / 16 * 16 + 16, step = S::kThreads >> a_.kv_heads;
    static_assert(S::kThreads >> S::kMostKvHeads >= 8);  // so that places repeat
    uint32_t to = ptx::shared_address(s_.keys) + piece() / 2 * Keys::kBytes +
                  Keys::offset(first_key(), piece() % 2);
    const T *k = keys_[0], *v = keys_[1];
    int key = first_key();
    const auto load_until = [&](int until) {
#pragma unroll 1
      for (; key < until; key += step) {
        const int bytes = key < a_.q_len ? 16 : 0;
        ptx::cp_async_16(to, bytes > 0 ? k : keys_[0], bytes);
        ptx::cp_async_16(to + sizeof(s_.keys[0]), bytes > 0 ? v : keys_[1], bytes);
        to += step * Keys::row_bytes(0);
        k += step * a_.k.row;
        v += step * a_.v.row;
      }
      ptx::cp_async_commit();
    };
    load_until(min(end, S::kSoonKeys));
    load_until(end);
  }

  // As fragments: rows are the tokens of one head, then of the other.
  __device__ __forceinline__ void load_queries() {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const bool in = tiles_.has(t, group());
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const T* const from = q_at_[t] + x % 2 * S::kDim + x / 2 * 8;
        q_[t][x] = in ? *reinterpret_cast<const uint32_t*>(from) : 0;
      }
    }
  }

  // Chunks of 16 keys, of which each of the warps that share them takes a fourth: from c on to
  // `end`.
  __device__ __forceinline__ void attend(int& c, int end) {
    const int low = tiles_.has(0) ? tiles_.first(0) / 16 : -1, high = tiles_.first(1) / 16;
#pragma unroll 1
    for (; c < min(low, end); c += S::kShares) {
      load_chunk(c);
      add_chunk<false>(0, c);
      add_chunk<false>(1, c);
    }
    if (c == low && c < end) {
      load_chunk(c);
      add_chunk<true>(0, c);
    }
#pragma unroll 1
    for (; c < min(high, end); c += S::kShares) {
      load_chunk(c);
      add_chunk<false>(1, c);
    }
    if (c == high && c < end) {
      load_chunk(c);
      add_chunk<true>(1, c);
      c += S::kShares;
    }
  }

  __device__ __forceinline__ void set_parts() {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const ptx::Fragment& x = out_[t][n];
        s_.parts.out[warp()][2 * t + n][lane()] = {x[0], x[1], x[2], x[3]};
        float& sum = sum_[t][n];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (lane() % 4 == 0) s_.parts.sums[warp()][t][8 * n + group()] = sum;
      }
    }
  }

  __device__ __forceinline__ void load_chunk(int c) {
    const int h = head() >> a_.kv_shift;
    ptx::ldmatrix_x4(
        k_, ptx::shared_address(s_.keys[0][h]) + Keys::Lane::columns_first().at(16 * c, 0));
    ptx::ldmatrix_x4_trans(
        v_, ptx::shared_address(s_.keys[1][h]) + Keys::Lane::rows_first().at(16 * c, 0));
  }

  // kCut: tokens do not see all of the keys.
  template <bool kCut>
  __device__ __forceinline__ void add_chunk(int t, int c) {
    ptx::Fragment p[2] = {};
    ptx::mma_m16n8k16<T>(p[0], q_[t], k_[0], k_[1]);
    ptx::mma_m16n8k16<T>(p[1], q_[t], k_[2], k_[3]);
    const int seen =
        tiles_.first(t) + group() - 16 * c - lane() % 4 * 2;  // keys from the lane's on
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const bool hidden = kCut && seen < 8 * n + x % 2;
        // Some by multiply-adds, where it is special functions that are waited for.
        const bool mixed = !kCut && n == 1 && x % 2 == 1;
        p[n][x] = hidden ? 0.0f : mixed ? ptx::exp2_cubic(p[n][x]) : ptx::exp2_approx(p[n][x]);
        sum_[t][x / 2] += p[n][x];
      }
    }
    const uint32_t weights[4] = {ptx::pack<T>(p[0][0], p[0][1]), ptx::pack<T>(p[0][2], p[0][3]),
                                 ptx::pack<T>(p[1][0], p[1][1]), ptx::pack<T>(p[1][2], p[1][3])};
    ptx::mma_m16n8k16<T>(out_[t][0], weights, v_[0], v_[1]);
    ptx::mma_m16n8k16<T>(out_[t][1], weights, v_[2], v_[3]);
  }

  // Adds up what the warps have: a fragment to a warp.
  __device__ __forceinline__ void gather() {
    constexpr float kMost = fovea::cuda::kMostWeightSum, kLeast = fovea::cuda::kLeastWeightSum<T>;
    const int part = warp() % 4, t = part / 2, n = part % 2, first = warp() / 4 * S::kShares;
    float4 x{};
    float sum[2] = {};
#pragma unroll
    for (int s = 0; s < S::kShares; ++s) {
      const float4 y = s_.parts.out[first + s][part][lane()];
      x = {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w};
#pragma unroll
      for (int h = 0; h < 2; ++h) sum[h] += s_.parts.sums[first + s][t][8 * h + group()];
    }
    const bool in = tiles_.has(t, group());
    const float zero = fmaf(x.x, 0.0f, x.y * 0.0f) + fmaf(x.z, 0.0f, x.w * 0.0f);
    const bool trusted =
        zero == 0 && sum[0] >= kLeast && sum[1] >= kLeast && sum[0] <= kMost && sum[1] <= kMost;
    if (__syncthreads_or(in && !trusted)) {
      load_keys();  // the parts lie where they were
      ptx::cp_async_wait<0>();
      __syncthreads();
      attend_carefully();
      return;
    }
    const int row = t * S::kTokens + group(), col = n * 8 + lane() % 4 * 2;
    const float by[2] = {__fdividef(1.0f, sum[0]), __fdividef(1.0f, sum[1])};
    put(row, head() * S::kDim + col, ptx::pack<T>(x.x * by[0], x.y * by[0]));
    put(row, (head() + 1) * S::kDim + col, ptx::pack<T>(x.z * by[1], x.w * by[1]));
    if (n == 0 && lane() % 4 < 2 && in) {
      const int h = lane() % 4;
      keep_lse(head() + h, tiles_.first(t) + group(), log2f(h == 0 ? sum[0] : sum[1]));
    }
  }

  // Two neighbouring values of attention's output.
  __device__ __forceinline__ void put(int row, int col, uint32_t two) const {
    *reinterpret_cast<uint32_t*>(s_.heads + row * S::kPitch + col) = two;
  }

  __device__ __forceinline__ void keep_lse(int h, int token, float exponent) const {
    if (a_.lse == nullptr) return;
    a_.lse[at_.b * a_.lse_batch + h * a_.lse_head + token] = exponent * fovea::cuda::kLn2;
  }

  // By the plain formula: a row to four lanes, each with a fourth of the keys, which then have a
  // fourth of the channels each. Hidden keys are not read.
  __device__ __forceinline__ void attend_carefully() const {
    constexpr float kInfinity = __builtin_huge_valf();
    const int row = threadIdx.x / 4 / S::kHeads, h = threadIdx.x / 4 % S::kHeads;
    const int mine = threadIdx.x % 4, t = row / S::kTokens;
    const int token = tiles_.first(t) + row % S::kTokens;
    const bool in = tiles_.has(t, row % S::kTokens);
    const T* const q = a_.q.at<T>(at_.b, in ? token : 0) + h * S::kDim;
    const unsigned char* const k = s_.keys[0][h >> a_.kv_shift];
    const unsigned char* const v = s_.keys[1][h >> a_.kv_shift];
    const auto at = [](const unsigned char* keys, int key, int d) {
      return ptx::to_float(reinterpret_cast<const T*>(keys + Keys::offset(key, d / 8))[d % 8]);
    };
    float top = -kInfinity, sum = 0, x[S::kDim] = {};
#pragma unroll 1
    for (int key = mine; in && key <= token; key += 4) {
      float score = 0;
#pragma unroll
      for (int d = 0; d < S::kDim; ++d) score = fmaf(ptx::to_float(q[d]), at(k, key, d), score);
      if (score == -kInfinity) continue;
      const float reference = fmaxf(top, score), shrink = exp2f(top - reference);
      const float p = exp2f(score - reference);
      top = reference;
      sum = sum * shrink + p;
#pragma unroll
      for (int d = 0; d < S::kDim; ++d) x[d] = x[d] * shrink + p * at(v, key, d);
    }
    float reference = top;
    reference = fmaxf(reference, __shfl_xor_sync(0xffffffffu, reference, 1));
    reference = fmaxf(reference, __shfl_xor_sync(0xffffffffu, reference, 2));
    const float shrink = top == -kInfinity ? 0.0f : exp2f(top - reference);
    const auto over_quad = [&](float y) {
      y *= shrink;
      y += __shfl_xor_sync(0xffffffffu, y, 1);
      return y + __shfl_xor_sync(0xffffffffu, y, 2);
    };
    sum = over_quad(sum);
    const float by = sum == 0 ? 0.0f : 1 / sum;
#pragma unroll
    for (int d = 0; d < S::kDim; d += 2) {
      const float low = over_quad(x[d]), high = over_quad(x[d + 1]);
      if (d / 4 == mine) put(row, h * S::kDim + d, ptx::pack<T>(low * by, high * by));
    }
    if (in && mine == 0) keep_lse(h, token, sum == 0 ? -kInfinity : reference + log2f(sum));
  }

  // For backward.
  __device__ __forceinline__ void keep_heads() const {
    constexpr int kPieces = S::kWidth / 8;
    if (a_.heads.data == nullptr || threadIdx.x >= 2 * S::kTokens * kPieces) return;
    const int row = threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
    const int t = row / S::kTokens, token = row % S::kTokens;
    if (!tiles_.has(t, token)) return;
    *reinterpret_cast<uint4*>(a_.heads.at<T>(at_.b, tiles_.first(t) + token) + piece * 8) =
        *reinterpret_cast<const uint4*>(s_.heads + row * S::kPitch + piece * 8);
  }

  // As fragments, for the warp's columns of out. Depth is in an order in which a lane's is eight
  // neighbours of every 32, and columns in one in which a lane's of all fragments are neighbours.
  // Neighbouring columns lie in the same banks: they are read the other way round.
  __device__ __forceinline__ void read_weight() {
    const bool odd = group() % 2 != 0;
    const T* const from = s_.weight + lane() % 4 * 8 +
                          (warp() * S::kColumns + group() / 2 * 8 + group() % 2) * S::kWidth;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int n = i / 2, d = i % 2 * 2;
      const auto at = [&](bool second) {
        return *reinterpret_cast<const uint4*>(from + 2 * n * S::kWidth + 32 * (d + second));
      };
      const uint4 x = at(odd), y = at(!odd);
      weight_[n][d] = odd ? y : x;
      weight_[n][d + 1] = odd ? x : y;
    }
  }

  __device__ __forceinline__ void project() const {
    ptx::Fragment sum[4] = {};
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      const T* const from = s_.heads + group() * S::kPitch + 32 * d + lane() % 4 * 8;
      const uint4 low = *reinterpret_cast<const uint4*>(from);
      const uint4 high = *reinterpret_cast<const uint4*>(from + S::kTokens * S::kPitch);
      const uint32_t rows[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint4& w = weight_[n][d];
        ptx::mma_m16n8k16<T>(sum[n], rows[0], w.x, w.y);
        ptx::mma_m16n8k16<T>(sum[n], rows[1], w.z, w.w);
      }
    }
    const int column = warp() * S::kColumns + lane() % 4 * 8;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      if (!tiles_.has(t, group()) || column >= a_.columns) continue;
      const auto two = [&](int n) {
        return ptx::pack<T>(sum[n][2 * t] * a_.scale, sum[n][2 * t + 1] * a_.scale);
      };
      *reinterpret_cast<uint4*>(a_.out.at<T>(at_.b, tiles_.first(t) + group()) + column) = {
          two(0), two(1), two(2), two(3)};
    }
  }

  const OutputArguments& a_;
  Shared& s_;
  const RowAt at_;  // member of the batch, block of it
  const TwoTiles tiles_;
  const T *keys_[2], *q_at_[2];
  uint32_t q_[2][4], k_[4], v_[4];
  uint4 weight_[4][4];
  float sum_[2][2] = {};
  ptx::Fragment out_[2][2] = {};
};

template <typename T>
__global__ void __cluster_dims__(OutputShape::kBlocks, 1, 1)
    __launch_bounds__(OutputShape::kThreads, 1)
        attended_output_kernel(const __grid_constant__ OutputArguments a) {
  extern __shared__ __align__(128) std::byte output_shared[];
  OutputBlock<T>(a, *reinterpret_cast<OutputShared<T>*>(output_shared)).run();
}

}  // namespace fovea::layers::cuda
