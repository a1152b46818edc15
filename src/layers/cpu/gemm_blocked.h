// Products by blocks through the matrix class of an instruction set (prim/cpu/matrix.h), summed in
// float.
//
// The contraction is cut into chunks short enough for a panel of b to stay in the first cache.
// Where all of b fits in the shared scratch it is packed there once, in strips of columns: that is
// a projection, b being the weights. Whoever packs a strip multiplies rows with it, from its own
// caches, and helps others when no strip is left (prim/cpu/strips.h). Where the contraction is long
// (a weight's gradient sums over all rows) each tile packs what it needs, chunk by chunk. A handful
// of rows are dot products (gemm_few_rows.h).
#pragma once

#include <concepts>

#include "layers/cpu/gemm_few_rows.h"
#include "layers/cpu/gemm_operands.h"
#include "layers/cpu/kernels.h"
#include "prim/cpu/strips.h"
#include "prim/cpu/thread_pool.h"

namespace fovea::FOVEA_ISA {

using layers::cpu::GemmScratch;

template <typename T, typename M>
class BlockedGemm : GemmOperands<T, M> {
  using Operands = GemmOperands<T, M>;
  using Operands::kRowsAsTheyLie, Operands::kRowsNear, Operands::kSideBySide, Operands::kSlices;
  using Operands::least, Operands::lies, Operands::parts, Operands::up;
  using typename Operands::Chunk, typename Operands::Elem, typename Operands::Product,
      typename Operands::Tile;
  using FewRows = FewRowsGemm<T>;

  // The longest stretch of the contraction that is multiplied at once: a panel of b is 32 KB then,
  // with short vectors 16 KB. Where a is packed too, not only b, stretches of floats are shorter;
  // slices and b both come from the second cache, whatever their length.
  static constexpr int64_t kChunk = kLanes == 4 || sizeof(Elem) != 4 ? 512 : 256;
  static constexpr int64_t kPackedChunk = sizeof(Elem) == 4 ? 256 : 512;
  static constexpr int64_t kSlicedChunk = 1024, kLongestChunk = kSlices ? kSlicedChunk : kChunk;
  static constexpr int64_t kPackColumns = 64, kPackDepths = 64;                // packed at once
  static constexpr int64_t kOwnRows = Operands::kMostRows, kOwnColumns = 256;  // b packed by tile
  // Of tiles where b is packed by strips. Where tiles do not pack their rows, strips are so narrow
  // that one stays in the second cache while rows pass. Of the last rows tiles have fewer, so that
  // threads end together.
  static constexpr int64_t kTileRows = kSlices ? 96 : 128, kFewestRows = kTileRows / 4;
  static constexpr int64_t kTileColumns = 512, kNarrowColumns = 128;
  // Tiles for each thread, at least: cores are not equally fast at all times.
  static constexpr int64_t kTilesOfThread = kRowsAsTheyLie ? 8 : 3;
  // Rows packed in slices are multiplied faster, and are packed again for each strip: strips are as
  // wide as may be. Rows that could be read as they lie are packed if strips that pay for it are
  // enough for the threads.
  static constexpr int64_t kSlicedColumns = 1024, kLeastSliced = 256;
  static constexpr int64_t kSlicedTilesOfThread = 4, kTilesThatPay = 6;  // at least
  static constexpr int64_t kLeastColumns = 512;  // that one packing of b should cover
  static constexpr int64_t kMostStrips = 1024;

  static constexpr int64_t kTileFloats = kTileRows * (kSlices ? kSlicedColumns : kTileColumns);
  static_assert(kTileFloats >= kOwnRows * kOwnColumns && sizeof(T) <= sizeof(Elem));
  static_assert(kPackColumns % M::kColumnAlign == 0 && kChunk % M::kDepthAlign == 0);
  static_assert(kPackedChunk % M::kDepthAlign == 0 && kPackedChunk <= kChunk);
  static_assert(kTileRows % M::kRowAlign == 0 && kOwnRows % M::kRowAlign == 0);
  static_assert(kTileRows <= kOwnRows && kTileRows % kFewestRows == 0);
  static_assert(kFewestRows % M::kRowAlign == 0);

  static constexpr int64_t left_size() { return Operands::left_size(kLongestChunk); }

 public:
  static constexpr size_t kPackedScratch = size_t{8} << 20;
  static constexpr size_t kSharedScratch = kPackedScratch + kMostStrips * kStripBytes;
  static constexpr size_t kWorkerScratch =
      kTileFloats * sizeof(float) +
      (left_size() + (kOwnColumns + kPackColumns) * kLongestChunk) * sizeof(Elem);

  static void run(const Gemm* gemms, int64_t count, int threads, const GemmScratch& scratch) {
    for (int64_t first = 0; first < count;) {
      Group group;
      int64_t next = first;
      while (next < count && group.take(merged(gemms[next]))) ++next;
      if (next > first) {
        run_group(group, threads, scratch);
      } else {
        run_alone(merged(gemms[next++]), threads, scratch);
      }
      first = next;
    }
  }

 private:
  static int64_t longest_chunk(const Product& g) {
    return g.sliced ? kSlicedChunk : g.a.depth == 1 ? kChunk : kPackedChunk;
  }
  static int64_t chunk_count(const Product& g) {
    return g.blocks * parts(g.depth, longest_chunk(g));
  }
  static Chunk chunk_at(const Product& g, int64_t n) {
    const int64_t longest = longest_chunk(g);
    const int64_t each = parts(g.depth, longest), first = n % each * longest;
    return {n / each, first, least(longest, g.depth - first)};
  }
  // Where the packed columns of a chunk begin, in elements for each column of b.
  static int64_t chunk_depth(const Product& g, int64_t n) {
    const int64_t longest = longest_chunk(g), each = parts(g.depth, longest);
    return n / each * up(g.depth, M::kDepthAlign) + n % each * longest;
  }
  static int64_t packed_columns(const Gemm& g) { return up(g.cols, M::kColumnAlign); }
  static int64_t packed_bytes(const Gemm& g) {
    const int64_t depth = g.blocks * up(g.depth, M::kDepthAlign);
    return depth * packed_columns(g) * static_cast<int64_t>(sizeof(Elem));
  }

  // Batch members that follow each other as rows do are rows.
  static Product merged(const Gemm& gemm) {
    Product g{gemm};
    if (g.batch > 1 && g.a.batch == g.rows * g.a.row && g.c_batch == g.rows * g.c_row) {
      g.rows *= g.batch;
      g.batch = 1;
    }
    return g;
  }

  // A product whose b is too large for the shared scratch: by columns that fit, or, where those
  // would be too few, packing by tile.
  static void run_alone(const Product& m, int threads, const GemmScratch& scratch) {
    if (FewRows::takes(m)) return FewRows::run(m, threads);
    const int64_t column =
        std::max<int64_t>(packed_bytes(m) / packed_columns(m), 1);  // 0: no depth
    const int64_t fit =
        least(static_cast<int64_t>(kPackedScratch) / column / kPackColumns, kMostStrips) *
        kPackColumns;
    if (fit < kLeastColumns) return run_with_own_packing(m, threads, scratch);
    for (int64_t first = 0; first < m.cols; first += fit) {
      Product piece = m;
      piece.cols = least(fit, m.cols - first);
      piece.b.data = static_cast<const T*>(m.b.data) + first * m.b.col;
      piece.c = static_cast<T*>(m.c) + first * m.c_col;
      if (m.bias != nullptr) piece.bias = static_cast<const T*>(m.bias) + first;
      Group group;
      group.take(piece);
      run_group(group, threads, scratch);
    }
  }

  // Products whose packed b fit in the shared scratch together.
  struct Group {
    static constexpr int64_t kMost = 16;
    Product products[kMost];
    int64_t count = 0, bytes = 0, columns = 0;
    int64_t packed[kMost] = {};  // byte offset of b
    int64_t wide = 0;            // a strip

    bool take(const Product& g) {
      if (count == kMost || FewRows::takes(g)) return false;
      const int64_t more = up(packed_bytes(g), 64), wider = up(g.cols, kPackColumns);
      if (bytes + more > static_cast<int64_t>(kPackedScratch)) return false;
      if (columns + wider > kMostStrips * kPackColumns) return false;
      products[count] = g;
      packed[count++] = bytes;
      bytes += more;
      columns += wider;
      return true;
    }

    // Into tiles: narrower strips where there would be too few for the threads.
    void cut(int threads) {
      bool lie = true;
      for (int64_t g = 0; g < count; ++g) lie = lie && lies(products[g]);
      const bool slices = kSlices && slice(threads);
      wide = slices ? kSlicedColumns : lie ? kNarrowColumns : kTileColumns;
      const int64_t enough = (slices ? kSlicedTilesOfThread : kTilesOfThread) * threads;
      while (tiles() < enough && wide > kPackColumns) wide /= 2;
    }

    // Chooses whose rows are packed in slices; says whether there are any.
    bool slice(int threads) {
      wide = kLeastSliced;
      const bool pays = tiles() >= kTilesThatPay * threads;
      bool any = false;
      for (int64_t g = 0; g < count; ++g) {
        Product& m = products[g];
        m.sliced = !lies(m) || (pays && m.cols >= kLeastSliced);
        any = any || m.sliced;
      }
      return any;
    }

    int64_t strips_of(int64_t g) const { return parts(products[g].cols, wide); }
    static int64_t tiles_of_strip(const Product& m) { return m.batch * parts(m.rows, kTileRows); }
    int64_t strips() const {
      int64_t sum = 0;
      for (int64_t g = 0; g < count; ++g) sum += strips_of(g);
      return sum;
    }
    int64_t tiles() const {
      int64_t sum = 0;
      for (int64_t g = 0; g < count; ++g) sum += strips_of(g) * tiles_of_strip(products[g]);
      return sum;
    }

    struct Strip {
      const Product& m;
      int64_t packed;          // byte offset of b
      int64_t first, columns;  // in m

      // What is packed at once, of a chunk: some columns, or where rows lie some depths of all.
      int64_t packs() const {
        return Operands::rows_lie(m) ? parts(least(m.depth, longest_chunk(m)), kPackDepths)
                                     : parts(columns, kPackColumns);
      }
      int64_t pieces_of_member() const { return parts(m.rows, kFewestRows); }  // of its rows
      StripSize size() const {
        return {chunk_count(m) * packs(), m.batch * pieces_of_member(), kTileRows / kFewestRows};
      }
    };
    Strip strip_at(int64_t n) const {
      int64_t g = 0;
      for (; n >= strips_of(g); ++g) n -= strips_of(g);
      return {products[g], packed[g], n * wide, least(wide, products[g].cols - n * wide)};
    }
  };

  static void run_group(Group& group, int threads, const GemmScratch& scratch) {
    group.cut(threads);
    const auto packed_at = [&](const typename Group::Strip& s, int64_t n, int64_t col) {
      auto* const packed = reinterpret_cast<Elem*>(scratch.shared + s.packed);
      return packed + chunk_depth(s.m, n) * packed_columns(s.m) + col * chunk_at(s.m, n).padded();
    };
    const auto pack = [&](int64_t strip, int64_t piece, int worker) {
      const auto s = group.strip_at(strip);
      const int64_t n = piece / s.packs(), part = piece % s.packs();
      if (Operands::rows_lie(s.m)) {
        Operands::pack_b_depths(s.m, chunk_at(s.m, n), s.first, s.columns, part * kPackDepths,
                                kPackDepths, packed_at(s, n, s.first));
        return;
      }
      const int64_t from = part * kPackColumns;
      Operands::pack_b(s.m, chunk_at(s.m, n), s.first + from, least(kPackColumns, s.columns - from),
                       packed_at(s, n, s.first + from), gathered_of(scratch, worker));
    };
    const auto multiply = [&](int64_t strip, int64_t begin, int64_t end, int worker) {
      const auto s = group.strip_at(strip);
      const int64_t down = s.pieces_of_member();
      for (int64_t next; begin < end; begin = next) {
        const int64_t batch = begin / down;
        next = least(end, (batch + 1) * down);
        const Tile t{batch, begin % down * kFewestRows, (next - begin) * kFewestRows, s.first,
                     s.columns};
        make_tile(s.m, clipped(s.m, t), worker, scratch,
                  [&](int64_t n, const Tile& at) { return packed_at(s, n, at.col); });
      }
    };
    parallel_strips(
        group.strips(), threads, scratch.shared + kPackedScratch,
        [&](int64_t strip) { return group.strip_at(strip).size(); }, pack, multiply);
  }

  static void run_with_own_packing(Product m, int threads, const GemmScratch& scratch) {
    m.sliced = kSlices;
    int64_t tall = kOwnRows;
    const int64_t across = parts(m.cols, kOwnColumns);
    while (m.batch * parts(m.rows, tall) * across < 2 * threads && tall > 64) tall /= 2;
    const int64_t down = parts(m.rows, tall);
    parallel_for(m.batch * down * across, threads, [&](int64_t item, int worker) {
      const Tile tile{item / across / down, item / across % down * tall, tall,
                      item % across * kOwnColumns, kOwnColumns};
      Elem* const own = packed_of(scratch, worker) + left_size();
      make_tile(m, clipped(m, tile), worker, scratch, [&](int64_t n, const Tile& t) {
        const Chunk chunk = chunk_at(m, n);
        for (int64_t c = 0; c < t.cols; c += kPackColumns) {
          Operands::pack_b(m, chunk, t.col + c, least(kPackColumns, t.cols - c),
                           own + c * chunk.padded(), gathered_of(scratch, worker));
        }
        return static_cast<const Elem*>(own);
      });
    });
  }

  static Tile clipped(const Product& m, Tile t) {
    t.rows = least(t.rows, m.rows - t.row);
    t.cols = least(t.cols, m.cols - t.col);
    return t;
  }

  static float* tile_of(const GemmScratch& s, int worker) {
    return reinterpret_cast<float*>(s.workers + worker * s.worker_bytes);
  }
  static Elem* packed_of(const GemmScratch& s, int worker) {
    return reinterpret_cast<Elem*>(tile_of(s, worker) + kTileFloats);
  }

  static T* gathered_of(const GemmScratch& s, int worker) {
    return reinterpret_cast<T*>(packed_of(s, worker) + left_size() + kOwnColumns * kLongestChunk);
  }

  // right(n, tile): the tile's packed columns of chunk n.
  template <typename Right>
  static void make_tile(const Product& m, const Tile& t, int worker, const GemmScratch& scratch,
                        const Right& right) {
    const bool here = summed_in_c(m, t);
    float* const c = here ? reinterpret_cast<float*>(row_of_c(m, t, 0)) : tile_of(scratch, worker);
    const int64_t padded_cols = up(t.cols, M::kColumnAlign), ldc = here ? m.c_row : padded_cols;
    const int cols = static_cast<int>(padded_cols);
    const int64_t at_once = least(t.rows, m.a.depth == 1 ? kRowsNear : kSideBySide);
    M::begin();
    for (int64_t n = 0; n < chunk_count(m); ++n) {
      const Chunk chunk = chunk_at(m, n);
      const Elem* const b = right(n, t);
      const int depth = static_cast<int>(chunk.padded());
      const bool set = n == 0 && !(here && m.add);
      const auto multiply = [&](int64_t row, int64_t rows, const auto& a) FOVEA_INLINED {
        float* const to = c + row * ldc;
        const int count = static_cast<int>(rows);
        set ? M::template multiply<false>(to, ldc, count, cols, depth, a, b, depth)
            : M::template multiply<true>(to, ldc, count, cols, depth, a, b, depth);
      };
      Elem* const own = packed_of(scratch, worker);
      if constexpr (kSlices) {
        if (m.sliced) {
          multiply(0, t.rows, Operands::slices_of(m, t, chunk, own));
          continue;
        }
      }
      auto a = Operands::left_of(m, t, chunk, own);
      const int64_t next = at_once * (m.a.depth == 1 ? row_of(a) : depth);
      for (int64_t row = 0; row < t.rows; row += at_once, a.data += next) {
        multiply(row, least(at_once, t.rows - row), a);
      }
    }
    M::end();
    if (here) return;
    if (chunk_count(m) == 0) {
      for (int64_t i = 0; i < t.rows * ldc; ++i) c[i] = 0;
    }
    store_tile(m, t, c, ldc);
  }

  // From one row to the next, where a tile's do not all meet b at once.
  static int64_t row_of(const typename M::Left& a) {
    if constexpr (kRowsNear < kOwnRows) {
      return a.row;
    } else {
      return 0;
    }
  }

  // Whether c can take a tile's sums as they grow.
  static bool summed_in_c(const Product& m, const Tile& t) {
    return std::same_as<T, float> && chunk_count(m) > 0 && m.scale == 1 && m.bias == nullptr &&
           m.c_col == 1 && t.cols % M::kColumnAlign == 0 && t.rows % M::kRowAlign == 0;
  }
  static T* row_of_c(const Product& m, const Tile& t, int64_t row) {
    return static_cast<T*>(m.c) + t.batch * m.c_batch + (t.row + row) * m.c_row + t.col * m.c_col;
  }

  static void store_tile(const Product& m, const Tile& t, const float* c, int64_t ldc) {
    const T* const bias = static_cast<const T*>(m.bias);
    const Vec scale = broadcast(static_cast<float>(m.scale));
    for (int64_t r = 0; r < t.rows; ++r, c += ldc) {
      T* const to = row_of_c(m, t, r);
      if (m.c_col != 1) {
        for (int64_t n = 0; n < t.cols; ++n) {
          const float x = c[n] * static_cast<float>(m.scale);
          put(to + n * m.c_col, m.add ? value_of(to[n * m.c_col]) + x : x);
        }
        continue;
      }
      for (int64_t n = 0; n < t.cols; n += kLanes) {
        const int left = static_cast<int>(t.cols - n);
        Vec x = load(c + n) * scale;
        if (bias != nullptr) x = x + load_up_to(bias + t.col + n, left);
        if (m.add) x = x + load_up_to(to + n, left);
        store_up_to(to + n, x, left);
      }
    }
  }
};

}  // namespace fovea::FOVEA_ISA
