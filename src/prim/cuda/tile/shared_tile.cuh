// A tile of rows of 16-bit values in shared memory, laid out so that ldmatrix and the 16-byte
// writes that fill it meet no bank conflicts.
//
// Columns are cut into panels of at most 64 (128 bytes); within a panel the 16-byte chunks of a row
// are exchanged by an exclusive or with the row, so that the eight rows that ldmatrix reads at once
// lie in eight different groups of banks.
#pragma once

#include <cstdint>

#include "prim/cuda/ptx/cp_async.cuh"
#include "prim/cuda/ptx/ldmatrix.cuh"

namespace fovea::tile {

template <int kRows_, int kCols_>
struct SharedTile {
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  static constexpr int kChunks = kCols / 8;  // of 16 bytes, in a row
  static constexpr int kBytes = kRows * kCols * 2;
  static_assert(kCols % 16 == 0 && (kCols % 64 == 0 || kCols % 64 == 32 || kCols == 16));
  static_assert(kRows % 16 == 0);

  // Chunks in a row of the panel that holds `chunk`.
  __host__ __device__ static constexpr int panel_width(int chunk) {
    const int left = kChunks - chunk / 8 * 8;
    return left < 8 ? left : 8;
  }

  // Byte offset of a chunk; the row's contribution to the exchange is row-dependent only.
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
    // mma. With trans it is the B operand of two neighbouring blocks of 8 columns, depth along rows.
    __device__ __forceinline__ static Lane rows_first() {
      const int lane = threadIdx.x % 32;
      return Lane(lane % 16, lane / 16);
    }
    // Columns 0-7 | 8-15 of rows 0-7 first: the B operand of two neighbouring blocks of 8 rows,
    // depth along columns.
    __device__ __forceinline__ static Lane columns_first() {
      const int lane = threadIdx.x % 32;
      return Lane(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    }
    // Byte offset of the block at (row, col), both multiples of 16; col known at compile time.
    __device__ __forceinline__ uint32_t at(int row, int col) const {
      const int chunk = col / 8, width = panel_width(chunk);
      const uint32_t base = width == 8 ? full_ : rest_;
      return chunk / 8 * (kRows * 128) + row * (width * 16) + (base ^ (chunk % 8 * 16));
    }

   private:
    __device__ __forceinline__ Lane(int row, int chunk)
        : full_(kChunks >= 8 ? offset(row, chunk) : 0),
          rest_(kChunks % 8 != 0 ? offset(row, kChunks / 8 * 8 + chunk) - kChunks / 8 * kRows * 128
                                 : 0) {}
    uint32_t full_, rest_;  // in panels of 8 chunks, and in a narrower last one
  };
};

// Fills a tile from rows of global memory, `stride` elements apart: rows from `rows` on and columns
// from `cols` on become zeros. kVector: rows begin on 16 bytes and cols is a multiple of 8.
template <typename Tile, int kThreads, typename T>
struct TileLoader {
  static constexpr int kPerRow = Tile::kChunks % 8 == 0 ? 8 : Tile::kChunks % 4 == 0 ? 4 : 2;
  static constexpr int kRowStep = kThreads / kPerRow;

  template <typename RowPointer>
  __device__ __forceinline__ static void fill(uint32_t shared, RowPointer row_pointer, int rows,
                                              int cols, bool vector) {
    const int first = threadIdx.x / kPerRow, lane = threadIdx.x % kPerRow;
    if (vector) {
#pragma unroll 1
      for (int r0 = 0; r0 < Tile::kRows; r0 += kRowStep) {
        const int r = r0 + first;
        if (Tile::kRows % kRowStep != 0 && r >= Tile::kRows) break;
        const bool in = r < rows;
        const T* const source = row_pointer(in ? r : 0);
#pragma unroll
        for (int c0 = 0; c0 < Tile::kChunks; c0 += kPerRow) {
          const int c = c0 + lane;
          const bool take = in && c * 8 < cols;
          ptx::cp_async_16(shared + Tile::offset(r, c), take ? source + c * 8 : source,
                           take ? 16 : 0);
        }
      }
    } else {
      for (int r = first; r < Tile::kRows; r += kRowStep) {
        const bool in = r < rows;
        const T* const source = row_pointer(in ? r : 0);
        for (int c = lane; c < Tile::kChunks; c += kPerRow) {
          uint32_t words[4];
          for (int w = 0; w < 4; ++w) {
            const int at = c * 8 + 2 * w;
            const auto bits = [&](int x) -> uint32_t {
              return in && x < cols ? reinterpret_cast<const uint16_t*>(source)[x] : 0u;
            };
            words[w] = bits(at) | bits(at + 1) << 16;
          }
          asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(shared + Tile::offset(r, c)),
                       "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                       : "memory");
        }
      }
    }
  }
};

}  // namespace fovea::tile
