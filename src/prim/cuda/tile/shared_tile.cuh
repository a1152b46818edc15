// A tile of rows in shared memory, laid out so that the warps that read it and the 16-byte writes
// that fill it meet no bank conflicts.
#pragma once

#include <cstdint>
#include <type_traits>

#include "prim/cuda/ptx/cp_async.cuh"
#include "prim/cuda/ptx/ldmatrix.cuh"
#include "prim/cuda/ptx/math.cuh"
#include "prim/cuda/tile/shared_floats.cuh"

namespace fovea::tile {

// 16-bit values. Columns are cut into panels of at most 64 (128 bytes); within a panel the 16-byte
// chunks of a row are exchanged by an exclusive or with the row, so that the eight rows that
// ldmatrix reads at once lie in eight different groups of banks. kFrugal: what lanes hand to
// ldmatrix is worked out where it is needed, for want of registers to keep it in.
template <typename T, int kRows_, int kCols_, bool kFrugal = false>
struct SharedTile {
  static constexpr int kRows = kRows_, kCols = kCols_;
  static constexpr int kPerChunk = 8;  // values of 16 bytes
  static constexpr int kChunks = kCols / kPerChunk;
  static constexpr int kBytes = kRows * kCols * 2;
  static_assert(sizeof(T) == 2);
  static_assert(kCols % 16 == 0 && (kCols % 64 == 0 || kCols % 64 == 32 || kCols == 16));
  static_assert(kRows % 16 == 0);

  // Chunks in a row of the panel that holds `chunk`.
  __host__ __device__ static constexpr int panel_width(int chunk) {
    if constexpr (kChunks % 8 == 0) return 8;
    const int left = kChunks - chunk / 8 * 8;
    return left < 8 ? left : 8;
  }

  // From a row to the next in the panel that holds `chunk`.
  __host__ __device__ static constexpr int row_bytes(int chunk) { return panel_width(chunk) * 16; }

  // Byte offset of a chunk.
  __device__ __forceinline__ static uint32_t offset(int row, int chunk) {
    const int width = panel_width(chunk);
    const int turn = width == 8 ? row & 7 : width == 4 ? (row >> 1) & 3 : (row >> 2) & 1;
    return chunk / 8 * (kRows * 128) + row * (width * 16) + ((chunk % 8) ^ turn) * 16;
  }

  // What a lane hands to ldmatrix for 16 x 16 blocks, kept out of loops: blocks differ from the
  // first by an exclusive or with a constant and an addition of one.
  class Lane {
   public:
    // Matrices in the order rows 0-7 | 8-15 of columns 0-7, then of columns 8-15: the A operand of
    // mma. With trans it is the B operand of two neighbouring blocks of 8 columns, depth along
    // rows.
    __device__ __forceinline__ static Lane rows_first() {
      const int lane = this_lane();
      return Lane(lane % 16, lane / 16);
    }
    // Columns 0-7 | 8-15 of rows 0-7 first: the B operand of two neighbouring blocks of 8 rows,
    // depth along columns.
    __device__ __forceinline__ static Lane columns_first() {
      const int lane = this_lane();
      return Lane(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    }
    // What a lane holds of fragments: columns 2 (lane % 4) and the next of `row`.
    __device__ __forceinline__ static Lane fragments(int row) {
      const int lane = this_lane();
      Lane at(row, 0);
      at.full_ += lane % 4 * 4;  // within a chunk, so that exchanges leave it alone
      at.rest_ += lane % 4 * 4;
      return at;
    }
    // Byte offset of the block at (row, col), multiples of 16, or 8 where fragments are meant.
    __device__ __forceinline__ uint32_t at(int row, int col) const {
      const int chunk = col / 8, width = panel_width(chunk);
      const uint32_t base = width == 8 ? full_ : rest_;
      return chunk / 8 * (kRows * 128) + row * (width * 16) + (base ^ (chunk % 8 * 16));
    }

   private:
    __device__ __forceinline__ static int this_lane() {
      uint32_t thread = threadIdx.x;
      if constexpr (kFrugal) asm volatile("" : "+r"(thread));
      return static_cast<int>(thread % 32);
    }
    __device__ __forceinline__ Lane(int row, int chunk)
        : full_(kChunks >= 8 ? offset(row, chunk) : 0),
          rest_(kChunks % 8 != 0 ? offset(row, kChunks / 8 * 8 + chunk) - kChunks / 8 * kRows * 128
                                 : 0) {}
    uint32_t full_, rest_;  // in panels of 8 chunks, and in a narrower last one
  };
};

// Floats: rows one after another, 16 bytes further apart than they are long, so that lanes that
// read one column of eight rows find them in different banks.
template <int kRows_, int kCols_, bool kFrugal>
struct SharedTile<float, kRows_, kCols_, kFrugal> {
  static constexpr int kRows = kRows_, kCols = kCols_;
  static constexpr int kPerChunk = 4;
  static constexpr int kChunks = kCols / kPerChunk;
  static constexpr int kRowBytes = kCols * 4 + 16;
  static constexpr int kBytes = kRows * kRowBytes;

  __host__ __device__ static constexpr int row_bytes(int) { return kRowBytes; }
  __device__ __forceinline__ static uint32_t offset(int row, int chunk) {
    return row * kRowBytes + chunk * 16;
  }
};

// Floats for tensor cores: laid out, and handed to ldmatrix, as twice as many 16-bit values.
template <int kRows_, int kCols_, bool kFrugal>
struct SharedTile<ptx::TensorFloat, kRows_, kCols_, kFrugal>
    : SharedTile<uint16_t, kRows_, 2 * kCols_, kFrugal> {
  using Halves = SharedTile<uint16_t, kRows_, 2 * kCols_, kFrugal>;
  static constexpr int kCols = kCols_, kPerChunk = 4;

  // A lane's words of the operand whose depth is along rows: column lane / 4 of rows 2 (lane % 4)
  // and the next, which lie in 32 different banks each.
  class DeepLane {
    static_assert(kCols_ % 32 == 0);  // panels are whole

   public:
    __device__ __forceinline__ DeepLane() {
      const int lane = threadIdx.x % 32;
#pragma unroll
      for (int y = 0; y < 2; ++y) {
        at_[y] = Halves::offset(lane % 4 * 2 + y, lane / 16) + lane / 4 % 4 * 4;
      }
    }
    // Byte offset of the word `y` rows down, of the 8 x 8 block at (row, col).
    __device__ __forceinline__ uint32_t at(int row, int col, int y) const {
      return col / 32 * (kRows_ * 128) + row * 128 + (at_[y] ^ (col % 32 * 4));
    }

   private:
    uint32_t at_[2];
  };
};

// Orders of rows within every 32 of a tile, for keys, in which what one lane holds of scores is of
// neighbouring keys.
// kRunsOfEight: its columns (8 n + 2 q + e of lane q, for all n and e) are keys 8 q + 2 n + e.
// kRunsOfFour: its rows (8 n + g of group g of lanes, for all n) are keys 4 g + n.
enum class RowOrder { kPlain, kRunsOfEight, kRunsOfFour };

// The key that row `row` of such a tile holds; rows that are a sum of multiples of 16 and less add.
template <RowOrder kOrder>
__host__ __device__ constexpr int row_in_order(int row) {
  switch (kOrder) {
    case RowOrder::kRunsOfEight: return (row & ~31) | (row & 6) << 2 | (row & 24) >> 2 | (row & 1);
    case RowOrder::kRunsOfFour: return (row & ~31) | (row & 7) << 2 | (row & 24) >> 3;
    default: return row;
  }
}

// Fills a tile from rows of global memory: rows from `rows` on (to `filled`, a multiple of 16, if
// not all) and columns from `cols` on become zeros. `vector`: rows begin on 16 bytes and cols is a
// whole number of chunks; the values then come by cp.async, otherwise they are there when fill
// returns. kOrder: of rows, and `filled` then a multiple of 32.
template <typename T, typename Tile, int kThreads, RowOrder kOrder = RowOrder::kPlain>
struct TileLoader {
  static constexpr int kPerRow = Tile::kChunks % 8 == 0 ? 8 : Tile::kChunks % 4 == 0 ? 4 : 2;
  static constexpr int kRowStep = kThreads / kPerRow;
  static constexpr int kPerChunk = Tile::kPerChunk;

  // Whole tiles, which most are, take neither checks nor multiplications.
  __device__ __forceinline__ static bool takes_whole(int rows, int cols, bool vector) {
    return vector && rows >= Tile::kRows && cols == Tile::kCols;
  }

  // Rows `stride` apart.
  __device__ __forceinline__ static void fill(uint32_t shared, const T* base, int64_t stride,
                                              int rows, int cols, bool vector,
                                              int filled = Tile::kRows) {
    if (takes_whole(rows, cols, vector)) {
      fill_whole(shared, base, stride, 0);
      return;
    }
    fill_rows(
        shared, [&](int r) { return base + r * stride; }, rows, cols, vector, filled);
  }

  // A whole tile of whole rows, from row `row` of those that begin at `base`. kEnds: of rows from
  // `end` on it takes none and becomes zeros.
  template <bool kEnds = false>
  __device__ __forceinline__ static void fill_whole(uint32_t shared, const T* base, int64_t stride,
                                                    int row, int end = 0) {
    fill_share<kEnds>(shared, share(base, stride, row, end), stride);
  }

  // The same in two steps: what this thread is to bring, and bringing it.
  struct Share {
    const T* source;
    int left;         // rows from its first to the end
    uint32_t thread;  // whose it is
  };
  __device__ __forceinline__ static Share share(const T* base, int64_t stride, int row, int end,
                                                uint32_t thread = threadIdx.x) {
    const int first = source_row(thread / kPerRow), lane = thread % kPerRow;
    return {base + (row + first) * stride + lane * kPerChunk, end - row - first, thread};
  }
  template <bool kEnds>
  __device__ __forceinline__ static void fill_share(uint32_t shared, const Share& share,
                                                    int64_t stride) {
    constexpr bool kRepeats = kRowStep % 8 == 0;  // the exchange of chunks does
    static_assert(kOrder == RowOrder::kPlain || kRowStep % 16 == 0);
    const int first = share.thread / kPerRow, lane = share.thread % kPerRow;
    const T* source = share.source;
#pragma unroll
    for (int r = 0; r < Tile::kRows; r += kRowStep) {
      if (Tile::kRows % kRowStep != 0 && first + r >= Tile::kRows) break;
#pragma unroll
      for (int c = 0; c < Tile::kChunks; c += kPerRow) {
        const uint32_t to =
            shared + (kRepeats ? Tile::offset(first, c + lane) + r * Tile::row_bytes(c)
                               : Tile::offset(first + r, c + lane));
        if constexpr (kEnds) {
          ptx::cp_async_16(to, source + c * kPerChunk, share.left > source_row(r) ? 16 : 0);
        } else {
          ptx::cp_async_16(to, source + c * kPerChunk);
        }
      }
      source += (source_row(r + kRowStep) - source_row(r)) * stride;
    }
  }

  template <typename RowPointer>
  __device__ __forceinline__ static void fill_rows(uint32_t shared, RowPointer row_pointer,
                                                   int rows, int cols, bool vector,
                                                   int filled = Tile::kRows) {
    const int first = threadIdx.x / kPerRow, lane = threadIdx.x % kPerRow;
#pragma unroll 1
    for (int r = first; r < filled; r += kRowStep) {
      const bool in = source_row(r) < rows;
      const T* const source = row_pointer(in ? source_row(r) : 0);
      if (vector) {
#pragma unroll
        for (int c0 = 0; c0 < Tile::kChunks; c0 += kPerRow) {
          const int c = c0 + lane;
          const bool take = in && c * kPerChunk < cols;
          ptx::cp_async_16(shared + Tile::offset(r, c), take ? source + c * kPerChunk : source,
                           take ? 16 : 0);
        }
      } else {
        for (int c = lane; c < Tile::kChunks; c += kPerRow) {
          store_chunk(shared + Tile::offset(r, c), source, c * kPerChunk, in ? cols : 0);
        }
      }
    }
  }

  // What this thread has filled of a left operand, once it is there and before a barrier shows it
  // to others: floats for tensor cores are rounded where they lie, for products take them so.
  __device__ __forceinline__ static void round(uint32_t shared) {
    if constexpr (std::is_same_v<T, ptx::TensorFloat>) {
      constexpr int kPerStep = Tile::kChunks / kPerRow;
      constexpr int kPieces = Tile::kRows / kRowStep * kPerStep;
      constexpr int kBatch = kPieces < 4 ? kPieces : 4;  // on their way at a time
      static_assert(Tile::kRows % kRowStep == 0 && kPieces % kBatch == 0);
      const int first = threadIdx.x / kPerRow, lane = threadIdx.x % kPerRow;
      const auto at = [&](int piece) {
        return shared +
               Tile::offset(first + piece / kPerStep * kRowStep, lane + piece % kPerStep * kPerRow);
      };
#pragma unroll
      for (int piece = 0; piece < kPieces; piece += kBatch) {
        float4 x[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) x[i] = load_float4(at(piece + i));
#pragma unroll
        for (int i = 0; i < kBatch; ++i) store_float4(at(piece + i), ptx::round_to_tf32(x[i]));
      }
    }
  }

 private:
  __host__ __device__ static constexpr int source_row(int row) { return row_in_order<kOrder>(row); }

  __device__ __forceinline__ static void store_chunk(uint32_t shared, const T* source, int at,
                                                     int cols) {
#pragma unroll 1  // rare, and registers are dear
    for (int x = 0; x < kPerChunk; ++x) {
      const bool take = at + x < cols;
      if constexpr (sizeof(T) == 4) {
        const float value = take ? ptx::to_float(source[at + x]) : 0.0f;
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared + 4 * x), "f"(value) : "memory");
      } else {
        const uint16_t bits = take ? reinterpret_cast<const uint16_t*>(source)[at + x] : 0;
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(shared + 2 * x), "h"(bits) : "memory");
      }
    }
  }
};

}  // namespace fovea::tile
