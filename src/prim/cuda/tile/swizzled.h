// Tiles in shared memory as TMA writes and wgmma reads them: panels of 64 columns of 16-bit values,
// a row of a panel 128 bytes, its 16-byte pieces swizzled by the row. Plain arithmetic, so that the
// encoding can be tested without a GPU.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FOVEA_HOST_DEVICE __host__ __device__
#else
#define FOVEA_HOST_DEVICE
#endif

namespace fovea::tile {

inline constexpr int kPanelColumns = 64;
inline constexpr int kPanelRowBytes = 128;
inline constexpr int kSwizzleRows = 8;  // after which the pattern repeats
inline constexpr int kTileAlignment = kSwizzleRows * kPanelRowBytes;

template <int kRowCount, int kColumnCount>
struct SwizzledTile {
  static constexpr int kRows = kRowCount, kColumns = kColumnCount;
  static constexpr int kPanels = (kColumns + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kPanelBytes = kRows * kPanelRowBytes;
  static constexpr int kBytes = kPanels * kPanelBytes;
  static_assert(kPanelBytes % kTileAlignment == 0);

  // Of the 16-byte piece of columns 8 piece .. 8 piece + 7 of a row.
  static FOVEA_HOST_DEVICE constexpr uint32_t offset(int row, int piece) {
    return static_cast<uint32_t>(piece / 8 * kPanelBytes + row * kPanelRowBytes +
                                 ((piece % 8) ^ (row % kSwizzleRows)) * 16);
  }
};

// The descriptor of a matrix that begins at a shared-memory address: bits 0-13 the address, 16-29
// the leading and 32-45 the stride byte offset, all in 16 bytes; 62-63 the 128-byte swizzle.
// `stride` is from eight rows to the next eight, `leading` from a panel to the next where columns
// run over panels. In a cluster, addresses have the block's rank above bit 17.
FOVEA_HOST_DEVICE constexpr uint64_t matrix_descriptor(uint32_t address, uint32_t leading) {
  constexpr uint64_t kSwizzle128 = 1, kStride = kTileAlignment;
  return (kSwizzle128 << 62) | (kStride >> 4 << 32) |
         (static_cast<uint64_t>((leading >> 4) & 0x3fff) << 16) | ((address & 0x3ffff) >> 4);
}

// Tiles of 32 columns, in rows of 64 bytes with a swizzle of their own.
inline constexpr int kNarrowColumns = 32;
inline constexpr int kNarrowRowBytes = 64;

template <int kRowCount>
struct NarrowTile {
  static constexpr int kRows = kRowCount;
  static constexpr int kPieces = kNarrowRowBytes / 16;  // of a row
  static constexpr int kBytes = kRows * kNarrowRowBytes;
  static_assert(kRows % kSwizzleRows == 0);

  static FOVEA_HOST_DEVICE constexpr uint32_t offset(int row, int piece) {
    return static_cast<uint32_t>(row * kNarrowRowBytes + (piece ^ (row / 2 % kPieces)) * 16);
  }
};

FOVEA_HOST_DEVICE constexpr uint64_t narrow_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle64 = 2, kStride = kSwizzleRows * kNarrowRowBytes, kUnread = 1;
  return (kSwizzle64 << 62) | (kStride >> 4 << 32) | (kUnread << 16) | ((address & 0x3ffff) >> 4);
}

// Rows of 16 bytes, one after another, that are read as if each were there twice: 16 columns of
// which the last eight are the first again.
FOVEA_HOST_DEVICE constexpr uint64_t plain_descriptor(uint32_t address) {
  constexpr uint64_t kStride = kSwizzleRows * 16;
  return (kStride >> 4 << 32) | ((address & 0x3ffff) >> 4);
}

// Eight such rows, read again and again.
FOVEA_HOST_DEVICE constexpr uint64_t same_rows_descriptor(uint32_t address) {
  return (address & 0x3ffff) >> 4;
}

// What is added to a descriptor to move it on by bytes.
FOVEA_HOST_DEVICE constexpr uint64_t descriptor_step(int bytes) {
  return static_cast<uint64_t>(bytes >> 4);
}

// Rows along the product's outer dimension, columns along the summed one (Q, K): columns
// 16 step .. 16 step + 15.
template <typename Tile>
FOVEA_HOST_DEVICE constexpr uint64_t step_of_columns(int step) {
  return descriptor_step(step / 4 * Tile::kPanelBytes + step % 4 * 32);
}
// Rows along the summed dimension (V): rows 16 step .. 16 step + 15.
FOVEA_HOST_DEVICE constexpr uint64_t step_of_rows(int step) {
  return descriptor_step(step * 16 * kPanelRowBytes);
}
FOVEA_HOST_DEVICE constexpr uint64_t narrow_step_of_rows(int step) {
  return descriptor_step(step * 16 * kNarrowRowBytes);
}

}  // namespace fovea::tile
