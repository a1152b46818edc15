// Products of a handful of rows: dot products. Nothing is packed, because every value of b is used
// only that often.
#pragma once

#include "layers/cpu/element.h"
#include "layers/cpu/gemm.h"
#include "prim/cpu/simd_math.h"
#include "prim/cpu/thread_pool.h"

namespace fovea::FOVEA_ISA {

using layers::cpu::Gemm;

template <typename T>
class FewRowsGemm {
  static constexpr int64_t kRows = 4;      // at most
  static constexpr int64_t kColumns = 64;  // of a task

 public:
  static bool takes(const Gemm& g) {
    return g.batch * g.rows <= kRows && g.a.depth == 1 && g.b.depth == 1;
  }

  // Each column of b is read once, as it lies, and meets every row.
  static void run(const Gemm& m, int threads) {
    parallel_for((m.cols + kColumns - 1) / kColumns, threads, [&](int64_t item, int) {
      for (int64_t n = item * kColumns; n < m.cols && n < (item + 1) * kColumns; ++n) column(m, n);
    });
  }

 private:
  static void column(const Gemm& m, int64_t n) {
    const T* const b = static_cast<const T*>(m.b.data) + n * m.b.col;
    for (int64_t row = 0; row < m.batch * m.rows; ++row) {
      const int64_t batch = row / m.rows, r = row % m.rows;
      const T* const a = static_cast<const T*>(m.a.data) + batch * m.a.batch + r * m.a.row;
      Vec sums[4] = {zero(), zero(), zero(), zero()};
      for (int64_t t = 0; t < m.blocks; ++t) {
        dot(a + t * m.a.block, b + t * m.b.block, m.depth, sums);
      }
      float x = sum((sums[0] + sums[1]) + (sums[2] + sums[3])) * static_cast<float>(m.scale);
      if (m.bias != nullptr) x += value_of(static_cast<const T*>(m.bias)[n]);
      T* const to = static_cast<T*>(m.c) + batch * m.c_batch + r * m.c_row + n * m.c_col;
      put(to, m.add ? value_of(*to) + x : x);
    }
  }

  static void dot(const T* a, const T* b, int64_t depth, Vec (&sums)[4]) {
    int64_t k = 0;
    for (; k + 4 * kLanes <= depth; k += 4 * kLanes) {
      for (int i = 0; i < 4; ++i) {
        sums[i] = fma(load(a + k + i * kLanes), load(b + k + i * kLanes), sums[i]);
      }
    }
    for (; k < depth; k += kLanes) {
      const int left = static_cast<int>(depth - k);
      sums[0] = fma(load_up_to(a + k, left), load_up_to(b + k, left), sums[0]);
    }
  }
};

}  // namespace fovea::FOVEA_ISA
