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
  static constexpr int kPasses = (kC.dim_v + Tile::kColumns - 1) / Tile::kColumns;

 public:
  // Takes what it needs of `work`, which may change afterwards. `staging`: a Tile.
  __device__ __forceinline__ Epilogue(const ForwardArguments& a, const unsigned char* staging,
                                      const Work& work, int warpgroup)
      : a_(a),
        warpgroup_(warpgroup),
        head_(work.head),
        batch_at_(work.batch_at),
        rows_(rows_of(work, warpgroup)),
        row_(work.q_row + work.row + warpgroup * kRowsOfWarpgroup),
        part_(parts_row(a, work, warpgroup)),
        again_(work.care != a.care),
        s_out_(ptx::shared_address(staging)) {}

  __device__ __forceinline__ void store(const Softmax& softmax,
                                        const float (&out)[kC.dim_v / 2]) const {
    if (rows_ <= 0) return;
    if (in_parts()) return store_part(softmax, out);
    const Rescaled rescaled = divided(with_sink(softmax));
    // A box past the sequence is cut off by the tensor's end, unless another sequence follows.
    const bool by_tma = a_.p.cu_q == nullptr || rows_ == kRowsOfWarpgroup;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      stage(out, rescaled, pass);
      if (by_tma) ptx::fence_async_shared();
      join();
      if (by_tma) {
        if (thread() == 0) store_by_tma(pass);
      } else {
        store_rows(pass);
      }
    }
    store_lse(rescaled);
  }

  // The same of values that were freed of what is not finite: that goes to the rows that see it.
  __device__ __forceinline__ void store_clean(const Softmax& softmax,
                                              const float (&out)[kC.dim_v / 2], const Work& work,
                                              const RowsSeen& seen) const {
    if (rows_ <= 0) return;
    if (in_parts()) {
      store_part(softmax, out);
    } else {
      const Rescaled rescaled = divided(with_sink(softmax));
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        stage(out, rescaled, pass);
        join();
        store_rows(pass);
      }
      store_lse(rescaled);
    }
    join();
    add_nonfinite(work, seen);
  }

 private:
  // A lane's two rows: their softmax, and what their outputs are to be multiplied by.
  struct Rescaled {
    float reference[2], sum[2], factor[2];
  };

  static __device__ __forceinline__ int rows_of(const Work& work, int warpgroup) {
    const int row = work.row + warpgroup * kRowsOfWarpgroup;
    return kC.fills_from_end() && row < 0 ? 0 : min(work.q_len - row, kRowsOfWarpgroup);
  }

  static __device__ __forceinline__ int thread() { return threadIdx.x % kWarpgroup; }
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int warp() { return thread() / 32; }
  __device__ __forceinline__ void join() const {
    ptx::barrier_sync(kOwnBarrier + warpgroup_, kWarpgroup);
  }

  __device__ __forceinline__ bool in_parts() const {
    return kC.takes_parts() && a_.schedule.parts > 1;
  }
  // The first of the warpgroup's rows among those of all parts, which are few.
  static __device__ __forceinline__ int parts_row(const ForwardArguments& a, const Work& work,
                                                  int warpgroup) {
    if (!kC.takes_parts() || a.schedule.parts == 1) return 0;
    const int group = a.p.group, head_kv = work.head / group;
    const int head = work.part * (a.schedule.heads / group) + work.b * a.p.head_kv + head_kv;
    return head * group * a.p.q_len + (work.head - head_kv * group) * work.q_len + work.row +
           warpgroup * kRowsOfWarpgroup;
  }

  // Sums as they are: the merge divides. The sink is in the first part.
  __device__ __forceinline__ void store_part(const Softmax& softmax,
                                             const float (&out)[kC.dim_v / 2]) const {
    const Rescaled r = with_sink(softmax);
    const int row = 16 * warp() + lane() / 4, column = lane() % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + 8 * half >= rows_) continue;
      const int64_t at = part_ + row + 8 * half;
      float* const to = a_.parts.sums + at * a_.p.dim_v + column;
#pragma unroll
      for (int j = 0; j < kC.dim_v / 8; ++j) {
        if (8 * j >= a_.p.dim_v) break;
        *reinterpret_cast<float2*>(to + 8 * j) = make_float2(
            out[4 * j + 2 * half] * r.factor[half], out[4 * j + 2 * half + 1] * r.factor[half]);
      }
      if (lane() % 4 == 0) a_.parts.stats[at] = make_float2(r.reference[half], r.sum[half]);
    }
  }

  // A sink is a key with no value.
  __device__ __forceinline__ Rescaled with_sink(const Softmax& softmax) const {
    Rescaled r;
    float sink = Softmax::kNone;
    const bool later_part = in_parts() && part_ >= a_.schedule.heads * a_.p.q_len;
    if (a_.p.sink != nullptr && !later_part) sink = a_.p.sink[head_ * a_.p.sink_head] * kLog2e;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      r.reference[half] = softmax.reference[half];
      r.sum[half] = softmax.sum[half];
      r.factor[half] = 1;
      if (sink != Softmax::kNone) {
        const float top = fmaxf(softmax.reference[half], sink);
        r.factor[half] = ptx::exp2_approx(softmax.reference[half] - top);
        r.sum[half] = r.sum[half] * r.factor[half] + ptx::exp2_approx(sink - top);
        r.reference[half] = top;
      }
    }
    return r;
  }
  static __device__ __forceinline__ Rescaled divided(Rescaled r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      r.factor[half] = r.sum[half] == 0 ? 0.0f : __fdividef(r.factor[half], r.sum[half]);
    }
    return r;
  }

  __device__ __forceinline__ void store_lse(const Rescaled& r) const {
    if (a_.lse.data == nullptr || lane() % 4 != 0) return;
    const int row = 16 * warp() + lane() / 4;
    float* const to = a_.lse.data + batch_at_ * a_.lse.batch + head_ * a_.lse.head +
                      (int64_t{row_} + row) * a_.lse.row;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float lse = (r.reference[half] + __log2f(r.sum[half])) * kLn2;
      if (row + 8 * half < rows_)
        to[8 * half * a_.lse.row] = r.sum[half] == 0 ? Softmax::kNone : lse;
    }
  }

  __device__ __forceinline__ void stage(const float (&out)[kC.dim_v / 2], const Rescaled& rescaled,
                                        int pass) const {
    // What was there before has to be out of the buffer; what is done again, out of the way of
    // itself.
    if (thread() == 0) {
      if (again_) {
        ptx::tma_wait_stores();
      } else {
        ptx::tma_wait_stores_read();
      }
    }
    join();
    const int at = ptx::renewed(thread()), row = at / 32 * 16 + at % 16;
#pragma unroll
    for (int x16 = 0; x16 < Tile::kColumns / 16; ++x16) {
      const int step = pass * (Tile::kColumns / 16) + x16;
      if (step >= kC.dim_v / 16) break;
      uint32_t words[4];
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const float f = rescaled.factor[x % 2];
        words[x] = ptx::pack<T>(out[8 * step + 2 * x] * f, out[8 * step + 2 * x + 1] * f);
      }
      ptx::stmatrix_x4(s_out_ + Tile::offset(row, 2 * x16 + at % 32 / 16), words);
    }
  }

  __device__ __forceinline__ void store_by_tma(int pass) const {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      const int column = pass * Tile::kColumns + panel * tile::kPanelColumns;
      ptx::tma_store(a_.out, {column, row_, head_, batch_at_}, s_out_ + panel * Tile::kPanelBytes);
    }
    ptx::tma_commit_stores();
  }

  __device__ __forceinline__ T* out_row(int row) const {
    return static_cast<T*>(a_.results.data) + batch_at_ * a_.results.batch +
           head_ * a_.results.head + (int64_t{row_} + row) * a_.results.row;
  }

  __device__ __forceinline__ void store_rows(int pass) const {
    const int first = pass * Tile::kColumns;
    const int pieces = min(a_.p.dim_v - first, Tile::kColumns) / 8;
    if (pieces <= 0) return;
    T* const to = out_row(0) + first;
    const int count = rows_ * pieces;
#pragma unroll 1  // for want of registers
    for (int x = thread(); x < count; x += kWarpgroup) {
      const int row = x / pieces, piece = x - row * pieces;
      uint4 words;
      asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                   : "r"(s_out_ + Tile::offset(row, piece)));
      *reinterpret_cast<uint4*>(to + row * a_.results.row + piece * 8) = words;
    }
  }

  __device__ __forceinline__ void add_nonfinite(const Work& work, const RowsSeen& seen) const {
    const T* const v = static_cast<const T*>(a_.values.data) + work.batch_at * a_.values.batch +
                       work.head / a_.p.group * a_.values.head + work.kv_row * a_.values.row;
    const int end = min(work.end * kC.tile_kv, work.kv_len);
    for (int d = thread(); d < a_.p.dim_v; d += kWarpgroup) {
      for (int key = work.begin * kC.tile_kv; key < end; ++key) {
        const float x = ptx::to_float(v[key * a_.values.row + d]);
        if (x - x == 0) continue;
        for (int row = 0; row < rows_; ++row) {
          if (!seen.sees(row, key)) continue;
          if (in_parts()) {
            a_.parts.sums[(int64_t{part_} + row) * a_.p.dim_v + d] += x;
          } else {
            T& out = out_row(row)[d];
            out = ptx::from_float<T>(ptx::to_float(out) + x);
          }
        }
      }
    }
  }

  const ForwardArguments& a_;
  const int warpgroup_, head_, batch_at_;
  const int rows_;    // of this warpgroup that exist
  const int row_;     // the first, of the tensor
  const int part_;    // the first, of those of all parts
  const bool again_;  // outputs may be on their way to the same place
  const uint32_t s_out_;
};

}  // namespace fovea::cuda::hopper
