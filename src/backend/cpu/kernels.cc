// The kernels of one instruction set: this file is compiled once for each.
#include "backend/cpu/kernels.h"

#include <time.h>

#include "backend/cpu/backward.h"
#include "backend/cpu/bias_gradient.h"
#include "backend/cpu/forward.h"
#include "prim/cpu/matrix_of_isa.h"

#ifdef FOVEA_FLOATS_OF
namespace fovea::FOVEA_FLOATS_OF {
const cpu::Kernels* kernels(DType dtype);
}
#endif

namespace fovea::FOVEA_ISA {
namespace {

double seconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// A product whose operands stay in the nearest cache, repeated for 10 ms. On numbers, not zeros:
// the tile unit runs a fifth faster on those.
template <typename M>
double peak_flops_of_a_thread() {
  constexpr int kRows = 32, kCols = 32, kDepth = 128;
  // On the stack: where thread_local memory lies is a call, and one among products spills their
  // sums.
  alignas(64) typename M::Elem a[kRows * kDepth], b[kCols * kDepth];
  alignas(64) float c[kRows * kCols];
  uint32_t state = 1;
  const auto fill = [&](typename M::Elem* p, int n) {
    for (int i = 0; i < n; ++i) {
      state = state * 1664525u + 1013904223u;
      const float x = static_cast<float>(state >> 8) * 0x1p-23f - 1.0f;
      if constexpr (sizeof(typename M::Elem) == sizeof(float)) {
        p[i] = x;
      } else {
        p[i] = to_bf16(x);
      }
    }
  };
  fill(a, kRows * kDepth);
  fill(b, kCols * kDepth);
  M::begin();
  const double start = seconds();
  double flops = 0, now = start;
  while ((now = seconds()) - start < 0.01) {
    for (int i = 0; i < 64; ++i) {
      M::template multiply<false>(c, kCols, kRows, kCols, kDepth, M::left(a, kDepth), b, kDepth);
    }
    flops += 64.0 * 2 * kRows * kCols * kDepth;
  }
  M::end();
  return flops / (now - start);
}

template <typename T, typename M>
constexpr cpu::Kernels kTable = {
    .matrix = M::kName,
    .sizes = {.rows_per_task = M::kRowsPerTask,
              .tile_q = M::kTileQ,
              .tile_kv = M::kTileKv,
              .stream_rows = M::kStreamRows,
              .backward_tile_q = M::kBackwardTileQ,
              .backward_tile_kv = M::kBackwardTileKv},
    .forward_scratch = Forward<T, M>::scratch_bytes,
    .forward = Forward<T, M>::run,
    .partial_floats = Forward<T, M>::partial_floats,
    .join_partials = Forward<T, M>::join,
    .backward_scratch = Backward<T, M>::scratch_bytes,
    .backward = Backward<T, M>::run,
    .bias_gradient_scratch = BiasGradient<T, M>::scratch_bytes,
    .bias_gradient = BiasGradient<T, M>::run,
    .delta = Backward<T, M>::delta,
    .join_dq = Backward<T, M>::join_dq,
    .join_dkv = Backward<T, M>::join_dkv,
    .peak_flops_of_a_thread = peak_flops_of_a_thread<M>,
};

}  // namespace

const cpu::Kernels* kernels(DType dtype);
const cpu::Kernels* kernels(DType dtype) {
  switch (dtype) {
#ifdef FOVEA_FLOATS_OF
    case DType::kF32:
    case DType::kF16: return FOVEA_FLOATS_OF::kernels(dtype);
#else
    case DType::kF32: return &kTable<float, MatrixF32>;
    case DType::kF16: return &kTable<F16, MatrixF32>;
#endif
    case DType::kBf16: return &kTable<Bf16, MatrixBf16>;
    default: return nullptr;
  }
}

}  // namespace fovea::FOVEA_ISA
