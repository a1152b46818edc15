// Products of bf16 blocks by BFMMLA, accumulated in float. See matrix.h for what the members mean.
//
// BFMMLA multiplies 2 x 4 by 4 x 2 into 2 x 2, and both operands keep their four of depth together.
// A left operand is pairs of rows, [rows / 2][depth / 4][2][4]. A right operand is panels of 8
// columns, [depth / 4][8][4] each: four instructions' worth, one after another.
#pragma once

#include <arm_neon.h>

#include "prim/cpu/simd_math.h"

namespace fovea::FOVEA_ISA {

struct MatrixBfmmla {
  using Elem = Bf16;
  static constexpr const char* kName = "bf16";
  static constexpr Exp2 kExp2 = Exp2::kBf16;
  static constexpr int kPanel = 8;
  static constexpr int kColumnAlign = 8;
  static constexpr int kRowAlign = 2;
  static constexpr int kDepthAlign = 8;
  static constexpr bool kTransposedLeftIsAView = false;
  static constexpr bool kLeftIsSliced = false;
  static constexpr bool kLeftIsRows = false;
  static constexpr bool kOnePass = false;
  // Tiles are multiples of 12 rows, the largest block of accumulators. They are sized for caches of
  // 64 KiB and 1 MiB; not yet measured.
  static constexpr int kTileQ = 48;
  static constexpr int kCutTileQ = kTileQ;
  static constexpr int kTileKv = 256;
  static constexpr int kStreamRows = 4;
  static constexpr int kRowsPerTask = 480;
  static constexpr int kBackwardTileQ = 96;
  static constexpr int kBackwardTileKv = 128;
  static constexpr int kBackwardCutTileQ = kBackwardTileQ;
  static constexpr bool kProductsAreOperands = false;

  struct Left {
    const Bf16* data;
    int64_t row;  // elements from one row to the next, two of which are interleaved
  };
  static Left left(const Bf16* data, int64_t ld) { return {data, ld}; }
  static Left left_from(const Bf16* data, int64_t ld, int depth) { return {data + 2 * depth, ld}; }

  static void begin() {}
  static void end() {}

  static void pack_left_row(Bf16* dst, int64_t ld, int row, const Bf16* src, int depth,
                            int depth_pad) {
    Bf16* const to = left_group(dst, ld, row, 0);
    int d = 0;
    for (; d + 4 <= depth; d += 4) store_words(to + 2 * d, load_words(src + d));
    for (; d < depth_pad; d += 4) store_words(to + 2 * d, words_up_to(src + d, depth - d));
  }

  template <typename T>
  static void pack_left_transposed(Bf16* dst, int64_t ld, const Bf16* src, int64_t stride, int rows,
                                   int cols, int rows_pad, int cols_pad) {
    for (int r = 0; r < rows_pad; r += 4) {
      for (int c = 0; c < cols_pad; c += 8) {
        const Columns8 x = columns_of(src + r * stride + c, stride, rows - r, cols - c);
        for (int pair = 0; pair < 4; ++pair) {
          store_8(left_group(dst, ld, c + 2 * pair, r), x.pairs[pair]);
        }
      }
    }
  }

  template <typename T>
  static bool pack_right(Bf16* dst, const Bf16* src, int64_t stride, int depth, int depth_pad,
                         int cols) {
    for (int c = 0; c < cols; c += kPanel, dst += static_cast<int64_t>(depth_pad) * kPanel) {
      for (int k = 0; k < depth_pad; k += 4) {
        const Columns8 x = columns_of(src + k * stride + c, stride, depth - k, cols - c);
        for (int pair = 0; pair < 4; ++pair) store_8(dst + k * kPanel + 8 * pair, x.pairs[pair]);
      }
    }
    return has_nonfinite(src, stride, depth, cols);
  }

  template <typename T>
  static void pack_right_transposed(Bf16* dst, const Bf16* src, int64_t stride, int cols, int depth,
                                    int depth_pad) {
    for (int c = 0; c < cols; c += kPanel, dst += static_cast<int64_t>(depth_pad) * kPanel) {
      for (int i = 0; i < kPanel; ++i) {
        const Bf16* const row = src + (c + i) * stride;
        const int have = c + i < cols ? depth : 0;
        Bf16* const to = dst + 4 * i;
        int k = 0;
        for (; k + 4 <= have; k += 4) store_words(to + k * kPanel, load_words(row + k));
        for (; k < depth_pad; k += 4) store_words(to + k * kPanel, words_up_to(row + k, have - k));
      }
    }
  }

  FOVEA_INLINE static void store_left(Bf16* dst, int64_t ld, int row, int col, Vec x) {
    store(left_group(dst, ld, row, col), x);
  }
  FOVEA_INLINE static void store_right(Bf16* dst, int64_t depth_pad, int row, int col,
                                       const Vec (&x)[4]) {
    const auto narrow = [](Vec v) { return vreinterpretq_u16_bf16(vcvtq_low_bf16_f32(v)); };
    const uint16x8_t even = vzip1q_u16(narrow(x[0]), narrow(x[2]));
    const uint16x8_t odd = vzip1q_u16(narrow(x[1]), narrow(x[3]));
    Bf16* const p = dst + (col / kPanel) * depth_pad * kPanel + row * kPanel + col % kPanel * 4;
    store_8(p, vzip1q_u16(even, odd));
    store_8(p + 8, vzip2q_u16(even, odd));
  }
  FOVEA_INLINE static float right_at(const Bf16* src, int64_t depth_pad, int row, int col) {
    return to_float(src[(col / kPanel) * depth_pad * kPanel + row / 4 * 4 * kPanel +
                        col % kPanel * 4 + row % 4]);
  }

  template <bool kAccumulate>
  static void multiply(float* c, int64_t ldc, int rows, int cols, int depth, Left a, const Bf16* b,
                       int64_t b_depth_pad) {
    for (int n = 0; n < cols; n += kPanel, b += b_depth_pad * kPanel) {
      const auto at = [&](int m) { return a.data + m * a.row; };
      float* const out = c + n;
      int m = 0;
      for (; m + 12 <= rows && m + 16 != rows; m += 12) {  // 16 left: 8 + 8 beats 12 + 4
        tile<6, kAccumulate>(out + m * ldc, ldc, depth, at(m), a.row, b);
      }
      for (; m + 8 <= rows; m += 8) {
        tile<4, kAccumulate>(out + m * ldc, ldc, depth, at(m), a.row, b);
      }
      for (; m + 4 <= rows; m += 4) {
        tile<2, kAccumulate>(out + m * ldc, ldc, depth, at(m), a.row, b);
      }
      for (; m < rows; m += 2) {
        tile<1, kAccumulate>(out + m * ldc, ldc, depth, at(m), a.row, b);
      }
    }
  }

 private:
  // Pairs of columns (0, 1), (2, 3), (4, 5), (6, 7), four rows of each together.
  struct Columns8 {
    uint16x8_t pairs[4];
  };

  // Where four of depth of a row of a left operand lie.
  FOVEA_INLINE static Bf16* left_group(Bf16* dst, int64_t ld, int row, int depth) {
    return dst + (row - row % 2) * ld + 2 * depth + row % 2 * 4;
  }

  FOVEA_INLINE static uint16x4_t words_up_to(const Bf16* p, int n) {
    return load_first_words(p, n > 0 ? n : 0);
  }
  FOVEA_INLINE static uint16x8_t words_up_to_8(const Bf16* p, int n) {
    if (n >= 8) return vld1q_u16(reinterpret_cast<const uint16_t*>(p));
    const Words8 words = first_8_words(p, n > 0 ? n : 0);
    return vreinterpretq_u16_u64(vcombine_u64(vcreate_u64(words.low), vcreate_u64(words.high)));
  }
  FOVEA_INLINE static void store_8(Bf16* p, uint16x8_t x) {
    vst1q_u16(reinterpret_cast<uint16_t*>(p), x);
  }

  // A block of up to 4 rows and 8 columns of src, zeros where it has no more.
  FOVEA_INLINE static Columns8 columns_of(const Bf16* src, int64_t stride, int rows, int cols) {
    uint16x8_t x[4];
    for (int i = 0; i < 4; ++i) {
      x[i] = i < rows ? words_up_to_8(src + i * stride, cols) : vdupq_n_u16(0);
    }
    const uint16x8_t even_low = vzip1q_u16(x[0], x[2]), even_high = vzip2q_u16(x[0], x[2]);
    const uint16x8_t odd_low = vzip1q_u16(x[1], x[3]), odd_high = vzip2q_u16(x[1], x[3]);
    return {{vzip1q_u16(even_low, odd_low), vzip2q_u16(even_low, odd_low),
             vzip1q_u16(even_high, odd_high), vzip2q_u16(even_high, odd_high)}};
  }

  FOVEA_INLINE static bfloat16x8_t operand(const Bf16* p) {
    return vreinterpretq_bf16_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(p)));
  }
  FOVEA_INLINE static Vec low_halves(Vec x, Vec y) {
    return vreinterpretq_f32_f64(vtrn1q_f64(vreinterpretq_f64_f32(x), vreinterpretq_f64_f32(y)));
  }
  FOVEA_INLINE static Vec high_halves(Vec x, Vec y) {
    return vreinterpretq_f32_f64(vtrn2q_f64(vreinterpretq_f64_f32(x), vreinterpretq_f64_f32(y)));
  }

  // 2 kPairs rows x 8 columns of c. An accumulator holds two columns of two rows: its low half is
  // the first row. Six pairs make 24 accumulators, of which BFMMLA needs about 20 to be busy (four
  // a cycle, five cycles each), and leave registers for six left and two right operands.
  template <int kPairs, bool kAccumulate>
  FOVEA_INLINE static void tile(float* c, int64_t ldc, int depth, const Bf16* a, int64_t lda,
                                const Bf16* b) {
    Vec acc[kPairs][4];
    for (int p = 0; p < kPairs; ++p) {
      float* const row = c + 2 * p * ldc;
      for (int half = 0; half < 2; ++half) {
        const Vec r0 = kAccumulate ? load(row + 4 * half) : zero();
        const Vec r1 = kAccumulate ? load(row + ldc + 4 * half) : zero();
        acc[p][2 * half] = low_halves(r0, r1);
        acc[p][2 * half + 1] = high_halves(r0, r1);
      }
    }
    for (int k = 0; k < depth; k += 4) {
      bfloat16x8_t x[kPairs];
      for (int p = 0; p < kPairs; ++p) x[p] = operand(a + 2 * p * lda + 2 * k);
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) {
        const bfloat16x8_t y = operand(b + k * kPanel + 8 * q);
        for (int p = 0; p < kPairs; ++p) acc[p][q] = vbfmmlaq_f32(acc[p][q], x[p], y);
        // Loads stay on their side: all four at once would push accumulators out of the registers.
        __atomic_signal_fence(__ATOMIC_SEQ_CST);
      }
    }
    for (int p = 0; p < kPairs; ++p) {
      float* const row = c + 2 * p * ldc;
      for (int half = 0; half < 2; ++half) {
        store(row + 4 * half, low_halves(acc[p][2 * half], acc[p][2 * half + 1]));
        store(row + ldc + 4 * half, high_halves(acc[p][2 * half], acc[p][2 * half + 1]));
      }
    }
  }
};

}  // namespace fovea::FOVEA_ISA
