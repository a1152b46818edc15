// Products of bf16 blocks by AMX tiles, accumulated in float. See matrix.h for what the members
// mean.
//
// A tile is 16 rows of 64 bytes. A left operand is row-major bf16 (16 rows x 32 of depth a tile). A
// right operand is panels of 16 columns; a panel holds pairs of depth rows interleaved, [depth /
// 2][16][2], so that 32 of depth are one contiguous tile.
#pragma once

#include <immintrin.h>

#include "prim/cpu/bf16_pairs.h"

namespace fovea::FOVEA_ISA {

struct MatrixAmx : Bf16Pairs {
  static constexpr const char* kName = "bf16";
  static constexpr int kColumnAlign = 32;
  static constexpr int kRowAlign = 16;
  static constexpr int kDepthAlign = 32;
  static constexpr int kTileQ = 32;
  static constexpr int kCutTileQ = kTileQ;
  static constexpr int kTileKv = 1024;  // what a tile costs beside its products, paid less often
  static constexpr int kStreamRows = 4;
  static constexpr int kRowsPerTask = 2048;
  static constexpr int kBackwardTileQ = 128;
  static constexpr int kBackwardTileKv = 256;
  static constexpr int kBackwardCutTileQ = kBackwardTileQ;
  static constexpr bool kProductsAreOperands = false;

  // A constant: GCC takes loading it for a read of its first 8 bytes, and may leave out stores to
  // the others.
  static void begin() {
    alignas(64) static constexpr Configuration kEightTiles;
    _tile_loadconfig(&kEightTiles);
  }
  static void end() { _tile_release(); }

  static constexpr bool kOnePass = true;
  static constexpr int kSlotColumns = 64;

  // rows and the operands behind them are padded to 16, cols to 32, depth to 32.
  template <bool kAccumulate>
  static void multiply(float* c, int64_t ldc, int rows, int cols, int depth, Left a, const Bf16* b,
                       int64_t b_depth_pad) {
    memory_fence();
    for (int n = 0; n < cols; n += 32) {
      const Bf16* b0 = b + n * b_depth_pad;
      const Bf16* b1 = b0 + 16 * b_depth_pad;
      int m = 0;
      for (; m + 16 < rows; m += 32) {
        tiles_2x2<kAccumulate>(c + m * ldc + n, ldc, depth, a.data + m * a.row, a.row, b0, b1);
      }
      if (m < rows)
        tiles_1x2<kAccumulate>(c + m * ldc + n, ldc, depth, a.data + m * a.row, a.row, b0, b1);
    }
    memory_fence();
  }

  // GCC does not know that tile loads and stores touch memory: nothing may be moved across one.
  FOVEA_INLINE static void memory_fence() { asm volatile("" ::: "memory"); }

 private:
  // Eight tiles of 16 rows of 64 bytes, as LDTILECFG reads it.
  struct Configuration {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };

  template <bool kAccumulate>
  FOVEA_INLINE static void tiles_2x2(float* c, int64_t ldc, int depth, const Bf16* a, int64_t lda,
                                     const Bf16* b0, const Bf16* b1) {
    float* const c1 = c + 16 * ldc;
    const Bf16* const a1 = a + 16 * lda;
    const auto c_stride = static_cast<size_t>(ldc * 4), a_stride = static_cast<size_t>(lda * 2);
    if constexpr (kAccumulate) {
      _tile_loadd(0, c, c_stride);
      _tile_loadd(1, c + 16, c_stride);
      _tile_loadd(2, c1, c_stride);
      _tile_loadd(3, c1 + 16, c_stride);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int k = 0; k < depth; k += 32) {
      _tile_loadd(4, a + k, a_stride);
      _tile_loadd(6, b0 + k * 16, 64);
      _tile_loadd(7, b1 + k * 16, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, a1 + k, a_stride);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, c_stride);
    _tile_stored(1, c + 16, c_stride);
    _tile_stored(2, c1, c_stride);
    _tile_stored(3, c1 + 16, c_stride);
  }

  template <bool kAccumulate>
  FOVEA_INLINE static void tiles_1x2(float* c, int64_t ldc, int depth, const Bf16* a, int64_t lda,
                                     const Bf16* b0, const Bf16* b1) {
    const auto c_stride = static_cast<size_t>(ldc * 4), a_stride = static_cast<size_t>(lda * 2);
    if constexpr (kAccumulate) {
      _tile_loadd(0, c, c_stride);
      _tile_loadd(1, c + 16, c_stride);
    } else {
      _tile_zero(0);
      _tile_zero(1);
    }
    for (int k = 0; k < depth; k += 32) {
      _tile_loadd(4, a + k, a_stride);
      _tile_loadd(6, b0 + k * 16, 64);
      _tile_loadd(7, b1 + k * 16, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, c, c_stride);
    _tile_stored(1, c + 16, c_stride);
  }
};

}  // namespace fovea::FOVEA_ISA
