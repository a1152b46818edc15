// Products by plain sums, each element's terms in one fixed order: what a row gives does not depend
// on the rows beside it. The layers' float64, and the plain formula in the other types.
#pragma once

#include "layers/cpu/element.h"
#include "layers/cpu/kernels.h"
#include "prim/cpu/thread_pool.h"

namespace fovea::FOVEA_ISA {

using layers::cpu::Gemm;

template <typename T>
struct PlainGemm {
  static constexpr size_t kSharedScratch = 0;
  static constexpr size_t kWorkerScratch = 0;

  static void run(const Gemm* gemms, int64_t count, int threads, const layers::cpu::GemmScratch&) {
    for (int64_t g = 0; g < count; ++g) {
      const Gemm& one = gemms[g];
      const int64_t tiles = (one.rows + kRows - 1) / kRows;
      const int64_t strips = (one.cols + kStrip - 1) / kStrip;
      parallel_for(one.batch * tiles * strips, threads, [&one, tiles, strips](int64_t item, int) {
        const int64_t first = item / strips % tiles * kRows;
        const int64_t begin = item % strips * kStrip, end = least(one.cols, begin + kStrip);
        for (int64_t col = begin; col < end; col += kColumns) {
          tile(one, {item / strips / tiles, first, least(kRows, one.rows - first), col,
                     least(kColumns, end - col)});
        }
      });
    }
  }

 private:
  // Elements whose sums are made side by side, each by itself: they share loads, and vectors.
  static constexpr int64_t kRows = 4, kColumns = 8;
  static constexpr int64_t kStrip = 512;  // columns of a thread's item: rows may be few
  struct Tile {
    int64_t batch, row, rows, col, cols;
  };
  static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

  static void tile(const Gemm& g, const Tile& at) {
    using R = Real<T>;
    const T* const a = static_cast<const T*>(g.a.data) + at.batch * g.a.batch + at.row * g.a.row;
    const T* const b = static_cast<const T*>(g.b.data) + at.col * g.b.col;
    R sums[kRows][kColumns] = {};
    R right[kColumns] = {};
    for (int64_t t = 0; t < g.blocks; ++t) {
      for (int64_t k = 0; k < g.depth; ++k) {
        const T* const from = b + t * g.b.block + k * g.b.depth;
        for (int64_t n = 0; n < at.cols; ++n) right[n] = value_of(from[n * g.b.col]);
        for (int64_t m = 0; m < at.rows; ++m) {
          const R left = value_of(a[m * g.a.row + t * g.a.block + k * g.a.depth]);
          for (int64_t n = 0; n < kColumns; ++n) sums[m][n] += left * right[n];
        }
      }
    }
    for (int64_t m = 0; m < at.rows; ++m) {
      T* const c = static_cast<T*>(g.c) + at.batch * g.c_batch + (at.row + m) * g.c_row;
      for (int64_t n = 0; n < at.cols; ++n) {
        R sum = sums[m][n] * static_cast<R>(g.scale);
        if (g.bias != nullptr) sum += value_of(static_cast<const T*>(g.bias)[at.col + n]);
        T* const to = c + (at.col + n) * g.c_col;
        put(to, g.add ? value_of(*to) + sum : sum);
      }
    }
  }
};

}  // namespace fovea::FOVEA_ISA
