// A warpgroup that computes. It holds some tiles of 64 keys, their values and their gradients in
// registers, and goes through a stage of query rows cell by cell: 32 rows and one of its tiles of
// keys. Keys are the rows of all its products but dQ's, so that weights and gradients of scores are
// left operands as they come; for dQ the latter meet those of other warpgroups in shared memory.
#pragma once

#include <type_traits>

#include "backend/cuda/hopper/backward/shared.cuh"
#include "backend/cuda/portable/backward/element.cuh"
#include "prim/cuda/ptx/movmatrix.cuh"
#include "prim/cuda/ptx/registers.cuh"
#include "prim/cuda/ptx/tma.cuh"
#include "prim/cuda/ptx/wgmma.cuh"

namespace fovea::cuda::hopper {

// kExponents: products q . k are exponents of 2 but for lse, which their sums go on with as those
// of dout . v do with delta.
template <typename Shape, bool kExponents>
class KeyGroup {
  using T = typename Shape::Element;
  using S = BackwardShared<Shape>;
  static constexpr BackwardConfig kC = Shape::kConfig;
  static constexpr int kDim = kC.dim, kD = kDim / 16, kM = kC.key_tiles, kRows = kC.rows();
  static constexpr int kKeyRows = 64;   // of a tile of keys
  static constexpr int kCellRows = 32;  // of queries
  static constexpr int kCells = kRows / kCellRows * kM;
  static constexpr int kSums = kDim / 2;  // of a lane, for 64 rows of all columns
  static_assert(kCells % 2 == 0 && kDim == 32);
  // dQ of the stage before is asked for in the middle of a stage, a share in each of some cells:
  // other warpgroups need not have been as fast as this one.
  static constexpr int kFirstDqCell = 2, kDqCells = 4, kDqSteps = kC.keys() / 16;
  static_assert(kFirstDqCell + kDqCells < kCells && kDqSteps % kDqCells == 0);

 public:
  __device__ __forceinline__ KeyGroup(const cuda::BackwardArguments& a, S& s, int group)
      : a_(a),
        s_(s),
        group_(group),
        rows_(s.rows_ring),
        ds_(s.ds_ring),
        d_q_(tile::narrow_descriptor(ptx::shared_address(s.q[0]))),
        d_delta_(tile::plain_descriptor(ptx::shared_address(s.delta[0]))),
        d_ones_(tile::same_rows_descriptor(ptx::shared_address(s.ones))),
        d_ds_(tile::matrix_descriptor(ptx::shared_address(s.ds[0]) + group * S::TileDs::kPanelBytes,
                                      16)),
        ds_at_(ptx::shared_address(s.ds[0]) +
               S::TileDs::offset(group * kC.group_keys() + warp() * 16 + lane() % 16, lane() / 16)),
        lse_at_(ptx::shared_address(s.minus_lse[0]) + lane() % 4 * 8) {}

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int i = 0; i < kM * kSums; ++i) dk_[i / kSums][i % kSums] = dv_[i / kSums][i % kSums] = 0;
    if (s_.work.count > 0) {
      load_keys();
      add_rows();
    }
    put_sums();
  }

 private:
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  // Where scores are exponents uniform registers run short, and others do not.
  __device__ __forceinline__ int group() const {
    return kExponents ? threadIdx.x / kWarpgroup : group_;
  }
  static __device__ __forceinline__ int warp() { return threadIdx.x % kWarpgroup / 32; }
  // The lane's first key of a tile; the other is 8 further on.
  __device__ __forceinline__ int key_in_block(int m) const {
    return group() * kC.group_keys() + m * kKeyRows + warp() * 16 + lane() / 4;
  }

  // K and V as left operands. Past the last key there is what nobody sees: the last one again.
  __device__ __forceinline__ void load_keys() {
    const Place& place = s_.work.place;
    const auto load = [&](const Rows& t, int m, uint32_t(&to)[kD][4]) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = min(place.key_begin + key_in_block(m) + 8 * half, place.s.kv_len - 1);
        const T* const from = rows_at<const T>(t, place.s, at, place.head_kv) + lane() % 4 * 2;
#pragma unroll
        for (int x = 0; x < 2 * kD; ++x) {
          to[x / 2][x % 2 * 2 + half] = *reinterpret_cast<const uint32_t*>(from + 8 * x);
        }
      }
    };
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      load(a_.k, m, k_[m]);
      load(a_.v, m, v_[m]);
    }
  }

  __device__ __forceinline__ void add_rows() {
    WalkedTile<Shape> at(s_.work), before(s_.work);  // this stage's rows, and the one's before
    const int count = s_.work.count;
    rows_.wait(0);
    ptx::wgmma_fence();
    ask_scores(rows_of(0), deltas_of(0), 0);
    ask_scores(rows_of(0), deltas_of(0), 1);
    ptx::wgmma_commit();
    load_lse(0, 0);
    ptx::wgmma_wait<0>();
    pin_scores(0);
    pin_scores(1);
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
      const int stage = rows_.stage(t), next = rows_.stage(t + 1);
      const uint64_t rows = rows_of(stage), next_rows = rows_of(next);
      const uint64_t deltas = deltas_of(stage), next_deltas = deltas_of(next);
      const uint64_t ds_before = ds_of(ds_.stage(t + 1)), keys = keys_of_block();
      bool whole[kM];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const int2 clear = s_.work.clear_of[group() * kM + m];
        whole[m] = at.row >= clear.x && at.row + kRows <= clear.y;
      }
      // Every cell weighs scores that are there, while those of the next and sums of the cell
      // before are computed. What is asked for is asked for always, though it may mean nothing:
      // were it conditional, the compiler would wait for it at once.
#pragma unroll
      for (int cell = 0; cell < kCells; ++cell) {
        if (__builtin_expect(whole[cell % kM], 1)) {
          weigh<false>(cell, at.row);
        } else {
          weigh<true>(cell, at.row);
        }
        if (cell + 2 == kCells && t + 1 < count) rows_.wait(t + 1);
        if ((cell + 1) % kM == 0) {
          load_lse(cell + 1 < kCells ? stage : next, (cell + 1) % kCells / kM);
        }
        if (cell == kFirstDqCell && t > 0) ds_.wait(t - 1);
        ptx::wgmma_wait<0>();
        pin_scores(cell + 1);
        if (cell == 0 && t > 0 && lane() == 0) rows_.release(t - 1);
        uint32_t weights[8], gradients[8];
        pack(scores_[cell % 2], weights);
        pack(products_[cell % 2], gradients);
        ptx::wgmma_fence();
        ask_sums(rows, cell, weights, gradients);
        ask_scores(cell + 2 < kCells ? rows : next_rows, cell + 2 < kCells ? deltas : next_deltas,
                   (cell + 2) % kCells);
        if (cell >= kFirstDqCell && cell < kFirstDqCell + kDqCells) {
          ask_dq(dq_, ds_before, keys, (cell - kFirstDqCell) * (kDqSteps / kDqCells),
                 kDqSteps / kDqCells);
        }
        ptx::wgmma_commit();
        if (cell == 0) ds_.wait_for_room(t);
        store_gradients(t, cell, gradients);
        if (cell == kFirstDqCell + kDqCells && t > 0) {
          ptx::pin(dq_);
          if (lane() == 0) ds_.release(t - 1);
          add_dq(dq_, before);
        }
      }
      ptx::fence_async_shared();
      __syncwarp();
      if (lane() == 0) ptx::mbarrier_arrive(ds_.full(t));
      before = at;
      at.advance();
    }
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      ptx::pin(dk_[m]);
      ptx::pin(dv_[m]);
    }
    ds_.wait(count - 1);
    ptx::wgmma_fence();
    ask_dq(dq_, ds_of(ds_.stage(count - 1)), keys_of_block(), 0, kDqSteps);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::pin(dq_);
    add_dq(dq_, before);
  }

  // Descriptors of a stage's query rows, of its gradients of scores, and of the keys. The compiler
  // does not know how they came about: that of a product is one addition to one of them, and is not
  // kept since the last time.
  __device__ __forceinline__ uint64_t rows_of(int stage) const {
    return ptx::renewed(d_q_ + tile::descriptor_step(stage * S::TileQ::kBytes));
  }
  __device__ __forceinline__ uint64_t deltas_of(int stage) const {
    return ptx::renewed(d_delta_ + tile::descriptor_step(stage * kRows * 16));
  }
  __device__ __forceinline__ uint64_t ds_of(int stage) const {
    return ptx::renewed(d_ds_ + tile::descriptor_step(stage * S::TileDs::kBytes));
  }
  __device__ __forceinline__ uint64_t keys_of_block() const {
    return ptx::renewed(d_q_ + tile::descriptor_step(S::kKeysAfterQ));
  }
  // From rows of q, or to those of dout, to a cell's.
  static __device__ __forceinline__ constexpr uint64_t cell_step(int cell) {
    return tile::descriptor_step(cell / kM * kCellRows * tile::kNarrowRowBytes);
  }
  static constexpr uint64_t kDout = tile::descriptor_step(S::kDoutAfterQ);
  static constexpr uint64_t kLse = tile::descriptor_step(sizeof(S::delta));

  // What is known of the lane's queries, the columns of its fragments: on its way before it is
  // waited for.
  __device__ __forceinline__ void load_lse(int stage, int chunk) {
    if constexpr (kExponents) return;
    const uint32_t from = lse_at_ + stage * kRows * 16 + chunk * kCellRows * 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) lse2_[j] = tile::load_float2(from + j * 32);
  }

  __device__ __forceinline__ void pin_scores(int cell) {
    ptx::pin(scores_[cell % 2]);
    ptx::pin(products_[cell % 2]);
  }

  // q . k and dout . v - delta of a cell.
  __device__ __forceinline__ void ask_scores(uint64_t rows, uint64_t deltas, int cell) {
    const int m = cell % kM;
    auto& scores = scores_[cell % 2];
    auto& products = products_[cell % 2];
    const uint64_t q = rows + cell_step(cell), dout = rows + (kDout + cell_step(cell));
    ptx::wgmma_rs_rows<T, true>(scores, k_[m][0], q);
#pragma unroll
    for (int d = 1; d < kD; ++d) {
      ptx::wgmma_rs_rows<T, false>(scores, k_[m][d], q + tile::descriptor_step(d * 32));
    }
    const uint64_t parts = deltas + tile::descriptor_step(cell / kM * kCellRows * 16);
    if constexpr (kExponents) {
      ptx::wgmma_ss_rows<__nv_bfloat16, false>(scores, d_ones_, parts + kLse);
    }
    ptx::wgmma_rs_rows<T, true>(products, v_[m][0], dout);
#pragma unroll
    for (int d = 1; d < kD; ++d) {
      ptx::wgmma_rs_rows<T, false>(products, v_[m][d], dout + tile::descriptor_step(d * 32));
    }
    ptx::wgmma_ss_rows<__nv_bfloat16, false>(products, d_ones_, parts);
  }

  // From scores to weights, and from products dout . v - delta to gradients of scores.
  template <bool kMasked>
  __device__ __forceinline__ void weigh(int cell, int row) {
    auto& scores = scores_[cell % 2];
    auto& products = products_[cell % 2];
    // Of the two keys of a lane, its first row from the first that sees them, and how many do.
    int from[2], seeing[2];
    if constexpr (kMasked) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int2 rows = s_.seeing[key_in_block(cell % kM) + 8 * i];
        from[i] = row + cell / kM * kCellRows + lane() % 4 * 2 - rows.x;
        seeing[i] = rows.y - rows.x;
      }
    }
#pragma unroll
    for (int x = 0; x < 16; ++x) {
      const float2 lse2 = lse2_[x / 4];
      const Gradient g = kExponents ? gradient_at(scores[x], products[x])
                                    : plain_gradient_of(a_.p, scores[x], products[x],
                                                        x % 2 == 0 ? lse2.x : lse2.y);
      const int i = x / 2 % 2;
      const bool seen = !kMasked || static_cast<uint32_t>(from[i] + x / 4 * 8 + x % 2) <
                                        static_cast<uint32_t>(seeing[i]);
      scores[x] = seen ? g.weight : 0.0f;
      products[x] = seen ? g.score : 0.0f;
    }
  }

  // Places in the accumulator are those of the next product's left operand.
  static __device__ __forceinline__ void pack(const float (&x)[16], uint32_t (&to)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = ptx::pack<T>(x[2 * i], x[2 * i + 1]);
  }

  __device__ __forceinline__ void ask_sums(uint64_t rows, int cell, const uint32_t (&weights)[8],
                                           const uint32_t (&gradients)[8]) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      ptx::wgmma_rs<T>(dv_[cell % kM], weights + 4 * step,
                       rows + (kDout + cell_step(cell) + tile::narrow_step_of_rows(step)));
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      ptx::wgmma_rs<T>(dk_[cell % kM], gradients + 4 * step,
                       rows + (cell_step(cell) + tile::narrow_step_of_rows(step)));
    }
  }

  __device__ __forceinline__ void store_gradients(int t, int cell,
                                                  const uint32_t (&gradients)[8]) const {
    const int chunk = cell / kM;
    const uint32_t to = ds_.stage(t) * S::TileDs::kBytes + chunk / 2 * S::TileDs::kPanelBytes +
                        cell % kM * (kKeyRows * tile::kPanelRowBytes);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const uint32_t(&x)[4] = *reinterpret_cast<const uint32_t(*)[4]>(gradients + 4 * step);
      ptx::stmatrix_x4((ds_at_ ^ ((chunk % 2 * 2 + step) * 32)) + to, x);
    }
  }

  // Products of gradients of scores and keys, 16 keys a step.
  static __device__ __forceinline__ void ask_dq(float (&dq)[kSums], uint64_t ds, uint64_t keys,
                                                int first, int steps) {
#pragma unroll
    for (int step = first; step < first + steps; ++step) {
      const uint64_t da = ds + tile::step_of_rows(step);
      const uint64_t db = keys + tile::narrow_step_of_rows(step);
      if (step == 0) {
        ptx::wgmma_ss_columns<T, true>(dq, da, db);
      } else {
        ptx::wgmma_ss_columns<T, false>(dq, da, db);
      }
    }
  }

  // Adds this warp's 16 rows of a stage's dq, where they exist.
  __device__ __forceinline__ void add_dq(const float (&dq)[kSums],
                                         const WalkedTile<Shape>& at) const {
    const int row = at.row + group() * kKeyRows + warp() * 16, rows = s_.work.place.s.q_len;
    if (row >= rows) return;
    add_to_sums<kDim>(a_.dq_sum, s_.work.sum_row + at.head * rows + row, 0, fragments(dq));
  }

  // A lane's sums as mma.sync would have them.
  using Fragments = ptx::Fragment[kSums / 4];
  static __device__ __forceinline__ const Fragments& fragments(const float (&x)[kSums]) {
    return *reinterpret_cast<const Fragments*>(&x);
  }

  __device__ __forceinline__ void put_sums() const {
    const Place& place = s_.work.place;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const int first = place.key_begin + group() * kC.group_keys() + m * kKeyRows + warp() * 16;
      if (a_.row_parts > 1) {
        if (first >= a_.p.kv_len) continue;
        const int64_t at = key_sum_row(a_.p, place) + first;
        add_to_sums<kDim>(a_.dk_sum, at, 0, fragments(dk_[m]));
        add_to_sums<kDim>(a_.dv_sum, at, 0, fragments(dv_[m]));
      } else {
        const auto put = [&](const Rows& t, const float(&x)[kSums], float scale) {
          store_key_rows<T>(t, place, first, a_.p.kv_len,
                            *reinterpret_cast<const Fragments(*)[1]>(&x), scale, kDim, true);
        };
        put(a_.dk, dk_[m], a_.p.scale);
        put(a_.dv, dv_[m], 1);
      }
    }
  }

  const cuda::BackwardArguments& a_;
  S& s_;
  const int group_;
  const tile::NumberedRing<kC.stages> rows_;
  const tile::NumberedRing<S::kScoreStages> ds_;
  const uint64_t d_q_, d_delta_, d_ones_, d_ds_;  // descriptors of the first stages
  const uint32_t ds_at_, lse_at_;                 // of this lane
  uint32_t k_[kM][kD][4], v_[kM][kD][4];
  float dk_[kM][kSums], dv_[kM][kSums], dq_[kSums];
  float scores_[2][16], products_[2][16];  // of two cells
  float2 lse2_[4];
};

}  // namespace fovea::cuda::hopper
