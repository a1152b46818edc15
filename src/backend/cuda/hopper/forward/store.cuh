// What a warpgroup leaves behind: outputs through shared memory, and lse.
#pragma once

#include "backend/cuda/hopper/forward/arguments.h"
#include "backend/cuda/hopper/forward/seen.cuh"
#include "backend/cuda/hopper/forward/softmax.cuh"
#include "prim/cuda/ptx/barrier.cuh"
#include "prim/cuda/ptx/movmatrix.cuh"
#include "prim/cuda/ptx/tma.cuh"

namespace fovea::cuda::hopper {

template <typename Shape>
class Epilogue {
  using T = typename Shape::Element;
  static constexpr ForwardConfig kC = Shape::kConfig;
  using Tile = typename Shared<Shape>::TileOut;

 public:
  __device__ __forceinline__ Epilogue(const ForwardArguments& a, Shared<Shape>& s, const Work& work,
                                      int warpgroup)
      : a_(a),
        work_(work),
        warpgroup_(warpgroup),
        row_(work.row + warpgroup * kRowsOfWarpgroup),
        rows_(min(work.q_len - row_, kRowsOfWarpgroup)),
        s_out_(ptx::shared_address(s.out[warpgroup])) {}

  __device__ __forceinline__ void store(const Softmax& softmax, const float (&out)[kC.dim_v / 2],
                                        const RowsSeen& seen) {
    if (rows_ <= 0) return;
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) inverse[half] = finish_row(softmax, half);
    // The tile before has to be out of the buffer; what is done again, out of the way of itself.
    if (thread() == 0) {
      if (work_.care != kBold) {
        ptx::tma_wait_stores();
      } else {
        ptx::tma_wait_stores_read();
      }
    }
    ptx::barrier_sync(kOwnBarrier + warpgroup_, kWarpgroup);
    stage(out, inverse);
    // A box past the sequence is cut off by the tensor's end, unless another sequence follows.
    const bool by_tma = (a_.p.cu_q == nullptr || rows_ == kRowsOfWarpgroup) &&
                        (work_.care & kClean) == 0;
    if (by_tma) ptx::fence_async_shared();
    ptx::barrier_sync(kOwnBarrier + warpgroup_, kWarpgroup);
    if (by_tma) {
      if (thread() == 0) store_by_tma();
      return;
    }
    store_rows();
    if ((work_.care & kClean) != 0) {
      ptx::barrier_sync(kOwnBarrier + warpgroup_, kWarpgroup);
      add_nonfinite(seen);
    }
  }

 private:
  static __device__ __forceinline__ int thread() { return threadIdx.x % kWarpgroup; }
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int warp() { return thread() / 32; }

  // Writes lse; what the row's outputs are to be multiplied by.
  __device__ __forceinline__ float finish_row(const Softmax& softmax, int half) const {
    const int row = 16 * warp() + lane() / 4 + 8 * half;
    float reference = softmax.reference[half], sum = softmax.sum[half], scale = 1;
    if (a_.p.sink != nullptr) {
      // A sink is a key with no value.
      const float sink = a_.p.sink[work_.head * a_.p.sink_head] * kLog2e;
      const float top = fmaxf(reference, sink);
      if (top != Softmax::kNone) {
        scale = ptx::exp2_approx(reference - top);
        sum = sum * scale + ptx::exp2_approx(sink - top);
        reference = top;
      }
    }
    if (a_.lse.data != nullptr && lane() % 4 == 0 && row < rows_) {
      a_.lse.data[work_.batch_at * a_.lse.batch + work_.head * a_.lse.head +
                  (int64_t{work_.q_row} + row_ + row) * a_.lse.row] =
          sum == 0 ? Softmax::kNone : (reference + log2f(sum)) * kLn2;
    }
    return sum == 0 ? 0.0f : scale / sum;
  }

  __device__ __forceinline__ void stage(const float (&out)[kC.dim_v / 2],
                                        const float (&inverse)[2]) const {
    const int row = 16 * warp() + lane() % 16;
#pragma unroll
    for (int step = 0; step < kC.dim_v / 16; ++step) {
      uint32_t words[4];
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const float f = inverse[x % 2];
        words[x] = ptx::pack<T>(out[8 * step + 2 * x] * f, out[8 * step + 2 * x + 1] * f);
      }
      ptx::stmatrix_x4(s_out_ + Tile::offset(row, 2 * step + lane() / 16), words);
    }
  }

  __device__ __forceinline__ void store_by_tma() const {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      ptx::tma_store(a_.out,
                     {panel * tile::kPanelColumns, work_.q_row + row_, work_.head, work_.batch_at},
                     s_out_ + panel * Tile::kPanelBytes);
    }
    ptx::tma_commit_stores();
  }

  __device__ __forceinline__ T* out_row(int row) const {
    return static_cast<T*>(a_.results.data) + work_.batch_at * a_.results.batch +
           work_.head * a_.results.head + (int64_t{work_.q_row} + row_ + row) * a_.results.row;
  }

  __device__ __forceinline__ void store_rows() const {
    const int pieces = a_.p.dim_v / 8;
    for (int x = thread(); x < rows_ * pieces; x += kWarpgroup) {
      const int row = x / pieces, piece = x - row * pieces;
      uint4 words;
      asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                   : "r"(s_out_ + Tile::offset(row, piece)));
      *reinterpret_cast<uint4*>(out_row(row) + piece * 8) = words;
    }
  }

  // Values that are not finite were left out: they go to every row that sees them.
  __device__ __forceinline__ void add_nonfinite(const RowsSeen& seen) const {
    const T* const v = static_cast<const T*>(a_.values.data) + work_.batch_at * a_.values.batch +
                       work_.head / a_.p.group * a_.values.head + work_.kv_row * a_.values.row;
    const int end = min(work_.end * kC.tile_kv, work_.kv_len);
    for (int d = thread(); d < a_.p.dim_v; d += kWarpgroup) {
      for (int key = work_.begin * kC.tile_kv; key < end; ++key) {
        const float x = ptx::to_float(v[key * a_.values.row + d]);
        if (x - x == 0) continue;
        for (int row = 0; row < rows_; ++row) {
          if (!seen.sees(row, key)) continue;
          T& out = out_row(row)[d];
          out = ptx::from_float<T>(ptx::to_float(out) + x);
        }
      }
    }
  }

  const ForwardArguments& a_;
  const Work& work_;
  const int warpgroup_, row_, rows_;
  const uint32_t s_out_;
};

}  // namespace fovea::cuda::hopper
