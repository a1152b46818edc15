// Products by plain sums, each element's terms in one fixed order: what a row gives does not depend
// on the rows beside it. The layers' float64.
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
      parallel_for(one.batch * one.rows, threads,
                   [&one](int64_t item, int) { row(one, item / one.rows, item % one.rows); });
    }
  }

 private:
  static void row(const Gemm& g, int64_t b, int64_t m) {
    using R = Real<T>;
    const T* const a = static_cast<const T*>(g.a.data) + b * g.a.batch + m * g.a.row;
    T* const c = static_cast<T*>(g.c) + b * g.c_batch + m * g.c_row;
    for (int64_t n = 0; n < g.cols; ++n) {
      const T* const w = static_cast<const T*>(g.b.data) + n * g.b.col;
      R sum = 0;
      for (int64_t t = 0; t < g.blocks; ++t) {
        const T* const left = a + t * g.a.block;
        const T* const right = w + t * g.b.block;
        for (int64_t k = 0; k < g.depth; ++k) {
          sum += value_of(left[k * g.a.depth]) * value_of(right[k * g.b.depth]);
        }
      }
      sum *= static_cast<R>(g.scale);
      if (g.bias != nullptr) sum += value_of(static_cast<const T*>(g.bias)[n]);
      T* const to = c + n * g.c_col;
      put(to, g.add ? value_of(*to) + sum : sum);
    }
  }
};

}  // namespace fovea::FOVEA_ISA
