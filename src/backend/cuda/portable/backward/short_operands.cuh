// Sixteen rows at a time, from global memory to a warp's own corner of shared memory, and from
// there to operands: what the blocks of short sequences multiply. No warp waits for another.
#pragma once

#include "backend/cuda/portable/backward/element.cuh"
#include "backend/cuda/portable/loads.cuh"
#include "prim/cuda/tile/products.cuh"

namespace fovea::cuda {

// Of a tensor so small that places in it are ints.
__device__ __forceinline__ int narrow(int64_t stride) { return static_cast<int>(stride); }

// Sixteen neighbouring rows of a head, as a lane fetches them: all of them are whole vectors.
template <typename T, int kDim>
class LaneRows {
 public:
  using Tile = tile::SharedTile<T, 16, kDim>;

  __device__ __forceinline__ LaneRows(const Rows& t, int batch, int row, int head, int cols)
      : t_(t),
        at_(batch * narrow(t.batch) + (row + row_of_lane()) * narrow(t.row) +
            head * narrow(t.head) + chunk_of_lane() * 8),
        within_(chunk_of_lane() * 8 < cols) {}

  __device__ __forceinline__ void move(int rows, int heads) {
    at_ += rows * narrow(t_.row) + heads * narrow(t_.head);
  }
  // Of the rows the first `rows` exist.
  __device__ __forceinline__ void load(uint32_t to, int rows) const {
#pragma unroll
    for (int r = 0; r < 16; r += kStep) {
      ptx::cp_async_16(to + lane_offset() + r * Tile::row_bytes(0),
                       static_cast<const T*>(t_.data) + at_ + r * narrow(t_.row),
                       within_ && row_of_lane() + r < rows ? 16 : 0);
    }
  }

 private:
  static constexpr int kStep = 32 / Tile::kChunks;
  static_assert(kStep % 8 == 0);  // the exchange of chunks repeats
  static __device__ __forceinline__ int row_of_lane() { return threadIdx.x % 32 / Tile::kChunks; }
  static __device__ __forceinline__ int chunk_of_lane() { return threadIdx.x % Tile::kChunks; }
  static __device__ __forceinline__ uint32_t lane_offset() {
    return Tile::offset(row_of_lane(), chunk_of_lane());
  }

  const Rows& t_;
  int at_;  // this lane's chunk of its first row
  const bool within_;
};

// Sixteen neighbouring query rows, with all that is known of them.
template <typename T, int kDim>
class ShortQueries {
 public:
  using Tile = typename LaneRows<T, kDim>::Tile;
  // In shared memory: Q, dO, O, lse.
  static constexpr int kDout = Tile::kBytes, kOut = 2 * kDout, kLse = 3 * kDout;
  static constexpr int kBytes = kLse + 128;
  static_assert(kBytes % 128 == 0);

  __device__ __forceinline__ ShortQueries(const BackwardArguments& a, int batch, int row, int head)
      : a_(a),
        q_(a.q, batch, row, head, a.p.dim_qk),
        dout_(a.dout, batch, row, head, a.p.dim_v),
        out_(a.out, batch, row, head, a.p.dim_v),
        lse_(batch * narrow(a.lse.batch) + head * narrow(a.lse.head) +
             (row + threadIdx.x % 32) * narrow(a.lse.row)) {}

  __device__ __forceinline__ void move(int rows, int heads) {
    q_.move(rows, heads);
    dout_.move(rows, heads);
    out_.move(rows, heads);
    lse_ += rows * narrow(a_.lse.row) + heads * narrow(a_.lse.head);
  }
  __device__ __forceinline__ void load(uint32_t to, int rows) const {
    q_.load(to, rows);
    dout_.load(to + kDout, rows);
    out_.load(to + kOut, rows);
    const int r = threadIdx.x % 32;
    if (r < min(rows, 16)) ptx::cp_async_4(to + kLse + r * 4, a_.lse.data + lse_);
  }

  // Of row r, with its product out . dout.
  static __device__ __forceinline__ RowStats stats(uint32_t at, int r, float dot) {
    const float lse = tile::load_float(at + kLse + r * 4);
    const bool blind = lse == -kInfinity;  // it sees nothing
    return {blind ? kInfinity : lse * kLog2e, blind ? 0.0f : dot};
  }

 private:
  const BackwardArguments& a_;
  LaneRows<T, kDim> q_, dout_, out_;
  int lse_;  // of row `lane`, if that is one of the sixteen
};

// Sixteen rows of a tile as operands of products.
template <typename T, int kDim>
struct Operand {
  static constexpr int kD = kDim / 16;
  using Tile = tile::SharedTile<T, 16, kDim>;
  uint32_t x[kD][4];

  // The A operand, depth along columns.
  __device__ __forceinline__ void load_rows(uint32_t from) {
#pragma unroll
    for (int d = 0; d < kD; ++d) {
      ptx::ldmatrix_x4(x[d], from + Tile::Lane::rows_first().at(0, d * 16));
    }
  }
  // The B operands of rows 0 .. 7, in [d][0] and [d][1], and of the others.
  __device__ __forceinline__ void load_columns(uint32_t from) {
#pragma unroll
    for (int d = 0; d < kD; ++d) {
      ptx::ldmatrix_x4(x[d], from + Tile::Lane::columns_first().at(0, d * 16));
    }
  }
  // The B operands with depth along rows: of columns 16 d .., in [d][0] and [d][1], and of the next
  // eight.
  __device__ __forceinline__ void load_deep(uint32_t from) {
#pragma unroll
    for (int d = 0; d < kD; ++d) {
      ptx::ldmatrix_x4_trans(x[d], from + Tile::Lane::rows_first().at(0, d * 16));
    }
  }

  __device__ __forceinline__ bool holds_nonfinite() const {
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < 4 * kD; ++i) found |= tile::nonfinite_bits<T>(x[i / 4][i % 4]);
    return (found & tile::kNonfinite) != 0;
  }
  __device__ __forceinline__ void leave_out_nonfinite() {
#pragma unroll
    for (int i = 0; i < 4 * kD; ++i) x[i / 4][i % 4] = tile::finite_word<T>(x[i / 4][i % 4]);
  }
};

// c = rows of A times the n-th eight rows of B, beginning at `start`.
template <typename T, int kDim>
__device__ __forceinline__ void multiply(ptx::Fragment& c, const Operand<T, kDim>& a,
                                         const Operand<T, kDim>& b, int n,
                                         const ptx::Fragment& start) {
  ptx::mma_m16n8k16<T>(c, a.x[0], b.x[0][2 * n], b.x[0][2 * n + 1], start);
#pragma unroll
  for (int d = 1; d < Operand<T, kDim>::kD; ++d) {
    ptx::mma_m16n8k16<T>(c, a.x[d], b.x[d][2 * n], b.x[d][2 * n + 1]);
  }
}

// out . dout of sixteen rows: what lies on the diagonal of their product. A lane has those of rows
// 8 n + 2 (lane % 4) and the next.
template <typename T, int kDim>
__device__ __forceinline__ void dot_rows(float (&dots)[2][2], const Operand<T, kDim>& out,
                                         const Operand<T, kDim>& dout) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    ptx::Fragment c;
    multiply(c, out, dout, n, {0, 0, 0, 0});
#pragma unroll
    for (int y = 0; y < 2; ++y) {
      // Row r is with lane 4 r + r / 2.
      const int pair = threadIdx.x % 4, r = 2 * pair + y;
      dots[n][y] = __shfl_sync(0xffffffffu, c[2 * n + y], 4 * r + pair);
    }
  }
}

}  // namespace fovea::cuda
