// The backward task: for each query head that it has, blocks of keys outside, tiles of queries
// inside. dk and dv of a block gather transposed ([dim][key]: the weights are then right operands,
// which need no transpose); dq of the head gathers in scratch.
#pragma once

#include "backend/cpu/gradient_tile.h"

namespace fovea::FOVEA_ISA {

using cpu::BackwardTask;
using cpu::DkvParts;
using cpu::DqParts;

template <typename T, typename M>
class Backward {
 public:
  using Elem = typename M::Elem;
  using Tile = GradientTile<T, M>;

  static size_t scratch_bytes(const Arguments& a, int64_t q_len, int64_t keys, int64_t heads) {
    ScratchCounter counter;
    Buffers buffers(a, q_len, keys, heads, counter);
    return counter.bytes();
  }

  static void run(const Arguments& a, const BackwardTask& task, std::byte* scratch) {
    ScratchCarver carver(scratch);
    Backward self(a, task, carver);
    M::begin();
    for (int64_t h = task.head_begin; h < task.head_end; ++h) self.query_head(h);
    M::end();
  }

  static void delta(const Arguments& a, const Head& head, int64_t head_q, int64_t begin,
                    int64_t end) {
    const Sequence& s = head.sequence;
    for (int64_t i = begin; i < end; ++i) {
      const T* o = row_pointer<T>(a.out, head, head_q, i, s.q_row);
      const T* g = row_pointer<T>(a.dout, head, head_q, i, s.q_row);
      Vec total = zero();
      for (int d = 0; d < a.dim_v; d += kLanes) {
        total = fma(load_up_to(o + d, a.dim_v - d), load_up_to(g + d, a.dim_v - d), total);
      }
      const float incoming =
          a.dlse.data == nullptr ? 0 : a.dlse.at(s.batch_at, head_q, s.q_row + i);
      a.delta.at(s.batch_at, head_q, s.q_row + i) = sum(total) - incoming;
    }
  }

  static void join_dq(const Arguments& a, const Head& head, int64_t head_q, int64_t begin,
                      int64_t end, const DqParts& parts) {
    const int64_t h = head_q - head.kv * a.group;
    for (int64_t tile = begin; tile < end; tile += kTileQ) {
      const int64_t tile_end = smaller(tile + kTileQ, end);
      const Sight sight = sight_of(a, head, h, tile);
      const bool some = sight.begin < sight.end;  // then parts that see a row have been written
      const int64_t from = some ? sight.begin / parts.keys : 0;
      const int64_t to = some ? (sight.end - 1) / parts.keys + 1 : 0;
      for (int64_t i = tile; i < tile_end; ++i) {
        T* const dq = row_pointer<T>(a.dq, head, head_q, i, head.sequence.q_row);
        const float* const row = parts.first + (h * head.sequence.q_len + i) * a.dim_qk;
        add_parts(row + from * parts.stride, to - from, parts.stride, a.dim_qk, a.scale, dq);
      }
    }
  }

  static void join_dkv(const Arguments& a, const Head& head, int64_t begin, int64_t end,
                       const DkvParts& parts) {
    constexpr int kAhead = 8;
    const int dims = a.dim_qk + a.dim_v;
    for (int64_t j = begin; j < end; ++j) {
      const float* const row = parts.first + j * dims;
      T* const dk = row_pointer<T>(a.dk, head, head.kv, j, head.sequence.kv_row);
      T* const dv = row_pointer<T>(a.dv, head, head.kv, j, head.sequence.kv_row);
      if (j + kAhead < end) {
        prefetch_to_write(dk + kAhead * a.dk.strides.row, a.dim_qk);
        prefetch_to_write(dv + kAhead * a.dv.strides.row, a.dim_v);
      }
      add_parts(row, parts.count, parts.stride, a.dim_qk, a.scale, dk);
      add_parts(row + a.dim_qk, parts.count, parts.stride, a.dim_v, 1.0f, dv);
    }
  }

 private:
  // to = scale * the sum of parts, `stride` apart.
  static void add_parts(const float* first, int64_t count, int64_t stride, int dim, float scale,
                        T* to) {
    for (int d = 0; d < dim; d += kLanes) {
      Vec total = zero();
      for (int64_t p = 0; p < count; ++p) {
        total = total + load_up_to(first + p * stride + d, dim - d);
      }
      store_up_to(to + d, total * broadcast(scale), dim - d);
    }
  }

  static constexpr int kTileQ = Tile::kTileQ;
  static constexpr int kTileKv = Tile::kTileKv;
  static constexpr int kGradStride = kTileKv + 16;

  struct Buffers {
    Elem *q_t, *dout_t;  // left operands of each tile, transposed
    Elem *q, *dout;      // left operands of each tile
    float *lse, *delta;  // [q_len]
    bool* nonfinite;     // per tile: whether dout holds NaN or Inf
    float* dq;           // [q_len][dq_cols]
    float *dk_t, *dv_t;  // per block of keys: [dim][kGradStride]
    T* clean;

    template <typename Scratch>
    Buffers(const Arguments& a, int64_t q_len, int64_t keys, int64_t heads, Scratch& from) {
      const Sizes n(a);
      const int64_t tiles = (q_len + kTileQ - 1) / kTileQ;
      const int64_t blocks = heads > 1 ? (keys + kTileKv - 1) / kTileKv : 1;
      q = from.template take<Elem>(tiles * kTileQ * n.qk_depth);
      dout = from.template take<Elem>(tiles * kTileQ * n.v_depth);
      q_t = q;
      dout_t = dout;
      if constexpr (!M::kTransposedLeftIsAView) {
        q_t = from.template take<Elem>(tiles * kTileQ * n.qk_rows);
        dout_t = from.template take<Elem>(tiles * kTileQ * n.v_rows);
      }
      lse = from.template take<float>(tiles * kTileQ);
      delta = from.template take<float>(tiles * kTileQ);
      nonfinite = from.template take<bool>(tiles);
      dq = from.template take<float>(tiles * kTileQ * n.qk_cols);
      dk_t = from.template take<float>(blocks * n.qk_rows * kGradStride);
      dv_t = from.template take<float>(blocks * n.v_rows * kGradStride);
      clean = from.template take<T>(Tile::clean_elements(a));
      tile_scratch = Tile::template reserve<Scratch>(a, from);
    }
    std::byte* tile_scratch;
  };

  // dim_qk and dim_v, padded for each role they play in a product.
  struct Sizes {
    int qk_depth, v_depth, qk_rows, v_rows, qk_cols;
    explicit Sizes(const Arguments& a)
        : qk_depth(round_up(a.dim_qk, M::kDepthAlign)),
          v_depth(round_up(a.dim_v, M::kDepthAlign)),
          qk_rows(round_up(a.dim_qk, 32)),
          v_rows(round_up(a.dim_v, 32)),
          qk_cols(round_up(a.dim_qk, M::kColumnAlign)) {}
  };

  Backward(const Arguments& a, const BackwardTask& task, ScratchCarver& carver)
      : a_(a),
        task_(task),
        head_(task.head),
        q_len_(task.head.sequence.q_len),
        n_(a),
        s_(a, q_len_, task.key_end - task.key_begin, heads(), carver),
        tile_(a, head_, s_.tile_scratch) {}

  int64_t heads() const { return task_.head_end - task_.head_begin; }

  void query_head(int64_t h) {
    const int64_t head_q = head_.kv * a_.group + h;
    for (int64_t i = 0; i < q_len_; i += kTileQ) {
      if (meets_keys(h, i)) pack_queries(head_q, i);
    }
    for (int64_t j = task_.key_begin; j < task_.key_end; j += kTileKv) {
      const int keys = static_cast<int>(smaller(kTileKv, task_.key_end - j));
      const int64_t block = heads() > 1 ? (j - task_.key_begin) / kTileKv : 0;
      float* const dk_t = s_.dk_t + block * n_.qk_rows * kGradStride;
      float* const dv_t = s_.dv_t + block * n_.v_rows * kGradStride;
      if (h == task_.head_begin) {
        for (int x = 0; x < n_.qk_rows * kGradStride; x += kLanes) store(dk_t + x, zero());
        for (int x = 0; x < n_.v_rows * kGradStride; x += kLanes) store(dv_t + x, zero());
      }
      key_block(h, j, keys, dk_t, dv_t);
      if (h + 1 == task_.head_end) write_keys(j, keys, dk_t, dv_t);
    }
    for (int64_t i = 0; i < q_len_; i += kTileQ) {
      if (meets_keys(h, i)) write_dq(h, head_q, i, smaller(i + kTileQ, q_len_));
    }
  }

  // Keys that rows of a tile see, from the first to the last.
  struct Sight {
    int64_t begin = 0, end = 0;
  };
  static Sight sight_of(const Arguments& a, const Head& head, int64_t h, int64_t tile) {
    const int64_t last = smaller(tile + kTileQ, head.sequence.q_len) - 1;
    return {row_at(a, head, h, tile).first_key(), row_at(a, head, h, last).last_key()};
  }

  // Whether the tile that begins at query i has a row that sees keys of this task, or is to make
  // delta and all of dq.
  bool meets_keys(int64_t h, int64_t i) const {
    if (task_.dq_partial == nullptr) return true;
    const Sight sight = sight_of(a_, head_, h, i);
    return sight.begin < task_.key_end && sight.end > task_.key_begin;
  }

  void pack_queries(int64_t head_q, int64_t i) {
    const int rows = static_cast<int>(smaller(kTileQ, q_len_ - i));
    const int64_t t = i / kTileQ;
    float* const dq = s_.dq + i * n_.qk_cols;
    for (int x = 0; x < rows * n_.qk_cols; x += kLanes) store(dq + x, zero());
    if (task_.dq_partial == nullptr) delta(a_, head_, head_q, i, i + rows);
    pack_side(a_.q, head_q, i, rows, a_.dim_qk, n_.qk_depth, s_.q + i * n_.qk_depth,
              s_.q_t + i * n_.qk_rows);
    s_.nonfinite[t] = pack_side(a_.dout, head_q, i, rows, a_.dim_v, n_.v_depth,
                                s_.dout + i * n_.v_depth, s_.dout_t + i * n_.v_rows);
    const Sequence& s = head_.sequence;
    for (int r = 0; r < kTileQ; ++r) {
      float lse = kMinusInf, delta = 0;
      if (r < rows) {
        lse = a_.lse.at(s.batch_at, head_q, s.q_row + i + r);
        delta = a_.delta.at(s.batch_at, head_q, s.q_row + i + r);
      }
      s_.lse[i + r] = tile_.lse_for_weights(lse);
      s_.delta[i + r] = delta;
    }
  }

  // Both left operands of one tile of q or dout; true when it had NaN or Inf, which are left out:
  // their row's lse or delta is NaN and carries them.
  bool pack_side(const Rows& t, int64_t head_q, int64_t i, int rows, int dim, int depth, Elem* left,
                 Elem* left_t) {
    const T* src = row_pointer<T>(t, head_, head_q, i, head_.sequence.q_row);
    int64_t stride = t.strides.row;
    const bool nonfinite = has_nonfinite(src, stride, rows, dim);
    if (nonfinite) {
      copy_finite(s_.clean, src, stride, rows, dim);
      src = s_.clean;
      stride = dim;
    }
    for (int r = 0; r < rows; ++r) M::pack_left_row(left, depth, r, src + r * stride, dim, depth);
    if constexpr (M::kTransposedLeftIsAView) {
      for (int r = rows; r < round_up(rows, M::kDepthAlign); ++r) {
        for (int d = 0; d < depth; ++d) left[r * depth + d] = Elem{};
      }
    } else {
      M::template pack_left_transposed<T>(left_t, kTileQ, src, stride, rows, dim,
                                          round_up(rows, M::kDepthAlign), round_up(dim, 32));
    }
    return nonfinite;
  }

  typename M::Left transposed(const Elem* left, int depth, const Elem* left_t) const {
    if constexpr (M::kTransposedLeftIsAView) {
      return M::transposed(M::left(left, depth));
    } else {
      return M::left(left_t, kTileQ);
    }
  }

  void key_block(int64_t h, int64_t j, int keys, float* dk_t, float* dv_t) {
    bool packed = false;
    int rows = 0;
    for (int64_t i = 0; i < q_len_; i += rows) {
      Columns columns;
      if (!choose_tile(h, i, j, keys, rows, columns)) continue;
      if (!packed) tile_.pack_keys(j, keys);
      packed = true;
      const Elem* q = s_.q + i * n_.qk_depth;
      const Elem* dout = s_.dout + i * n_.v_depth;
      tile_.weights(M::left(q, n_.qk_depth), M::left(dout, n_.v_depth), s_.lse + i, s_.delta + i,
                    columns);

      const int to_pad = round_up(columns.to, M::kColumnAlign);
      const int width = to_pad - columns.from;
      const int depth = round_up(rows, M::kDepthAlign);
      const int64_t right = int64_t{columns.from} * kTileQ;
      M::template multiply<true>(s_.dq + i * n_.qk_cols, n_.qk_cols, rows, n_.qk_cols, width,
                                 tile_.ds_left(columns.from),
                                 tile_.k_right() + int64_t{columns.from} * M::kPanel, kTileKv);
      M::template multiply<true>(dv_t + columns.from, kGradStride, a_.dim_v, width, depth,
                                 transposed(dout, n_.v_depth, s_.dout_t + i * n_.v_rows),
                                 tile_.p_right() + right, kTileQ);
      M::template multiply<true>(dk_t + columns.from, kGradStride, a_.dim_qk, width, depth,
                                 transposed(q, n_.qk_depth, s_.q_t + i * n_.qk_rows),
                                 tile_.ds_right() + right, kTileQ);
      if (s_.nonfinite[i / kTileQ]) add_nonfinite(h, i, rows, columns, dv_t);
    }
  }

  // The tile that begins at query i: a whole one, or a part where the mask cuts it. False when no
  // row of it sees a key.
  bool choose_tile(int64_t h, int64_t i, int64_t j, int keys, int& rows, Columns& columns) {
    constexpr int kCut = M::kBackwardCutTileQ;
    const auto choose = [&](int most) {
      rows = static_cast<int>(smaller(most, q_len_ - i));
      return tile_.set_rows(h, i, rows, j, keys, columns);
    };
    if (i % kTileQ != 0) return choose(kCut);
    const bool some = choose(kTileQ);
    return some && !tile_.all_visible() && kCut < kTileQ ? choose(kCut) : some;
  }

  // The NaN and Inf that were left out of dout, for the keys whose weight they meet.
  void add_nonfinite(int64_t h, int64_t i, int rows, Columns columns, float* dv_t) {
    for (int r = 0; r < rows; ++r) {
      const T* g =
          row_pointer<T>(a_.dout, head_, head_.kv * a_.group + h, i + r, head_.sequence.q_row);
      for (int d = 0; d < a_.dim_v; ++d) {
        const float x = to_float(g[d]);
        if (x - x == 0) continue;
        for (int j = columns.from; j < columns.to; ++j) {
          const float p = M::right_at(tile_.p_right(), kTileQ, r, j);
          if (p != 0) dv_t[d * kGradStride + j] += p * x;
        }
      }
    }
  }

  void write_keys(int64_t j, int keys, const float* dk_t, const float* dv_t) const {
    if (task_.dkv_partial != nullptr) {
      const auto rows_from = [&](int column) {
        const int dims = a_.dim_qk + a_.dim_v;
        float* const first = task_.dkv_partial + j * dims + column;
        return [=](int key) { return first + key * dims; };
      };
      write_transposed(rows_from(0), keys, a_.dim_qk, dk_t, 1.0f);
      write_transposed(rows_from(a_.dim_qk), keys, a_.dim_v, dv_t, 1.0f);
      return;
    }
    const auto rows_of = [&](const Rows& t) {
      return [this, j, &t](int key) {
        return row_pointer<T>(t, head_, head_.kv, j + key, head_.sequence.kv_row);
      };
    };
    write_transposed(rows_of(a_.dk), keys, a_.dim_qk, dk_t, a_.scale);
    write_transposed(rows_of(a_.dv), keys, a_.dim_v, dv_t, 1.0f);
  }

  template <typename RowOf>
  static void write_transposed(RowOf row_of, int keys, int dim, const float* src, float scale) {
    for (int x = 0; x < keys; x += kLanes) {
      for (int l = kLanes; l < 2 * kLanes && x + l < keys; ++l) {
        prefetch_to_write(row_of(x + l), dim);
      }
      for (int d = 0; d < dim; d += kLanes) {
        Vec block[kLanes];
        for (int l = 0; l < kLanes; ++l) {
          block[l] = d + l < dim ? load(src + (d + l) * kGradStride + x) : zero();
        }
        transpose_lanes(block);
        for (int l = 0; l < kLanes && x + l < keys; ++l) {
          store_up_to(row_of(x + l) + d, block[l] * broadcast(scale), dim - d);
        }
      }
    }
  }

  void write_dq(int64_t h, int64_t head_q, int64_t begin, int64_t end) {
    constexpr int kAhead = 16;
    for (int64_t i = begin; i < end; ++i) {
      const float* src = s_.dq + i * n_.qk_cols;
      if (task_.dq_partial != nullptr) {
        float* const dst = task_.dq_partial + (h * q_len_ + i) * a_.dim_qk;
        for (int d = 0; d < a_.dim_qk; d += kLanes) {
          store_up_to(dst + d, load(src + d), a_.dim_qk - d);
        }
        continue;
      }
      T* const dst = row_pointer<T>(a_.dq, head_, head_q, i, head_.sequence.q_row);
      if (i + kAhead < q_len_) prefetch_to_write(dst + kAhead * a_.dq.strides.row, a_.dim_qk);
      for (int d = 0; d < a_.dim_qk; d += kLanes) {
        store_up_to(dst + d, load(src + d) * broadcast(a_.scale), a_.dim_qk - d);
      }
    }
  }

  const Arguments& a_;
  const BackwardTask& task_;
  const Head& head_;
  const int64_t q_len_;
  const Sizes n_;
  Buffers s_;
  Tile tile_;
};

}  // namespace fovea::FOVEA_ISA
