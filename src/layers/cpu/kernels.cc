// The layers' kernels of one instruction set: this file is compiled once for each.
#include "layers/cpu/kernels.h"

#include "layers/cpu/couple.h"
#include "layers/cpu/depthwise.h"
#include "layers/cpu/gemm_blocked.h"
#include "layers/cpu/gemm_plain.h"
#include "layers/cpu/norm.h"
#include "layers/cpu/rotate.h"
#include "layers/cpu/rows.h"
#include "prim/cpu/matrix_of_isa.h"

namespace fovea::FOVEA_ISA {
namespace {

// G: products. S: what sums over rows are made in.
template <typename T, typename G, typename S>
constexpr layers::cpu::Kernels kTable = {
    .shared_scratch = G::kSharedScratch,
    .worker_scratch = G::kWorkerScratch,
    .gemm = G::run,
    .rotate = rotate_rows<T>,
    .normalise = normalise_rows<T>,
    .normalise_backward = normalise_rows_backward<T, S>,
    .column_sums = column_sums<T, S>,
    .store_sums = store_sums<T>,
    .copy = copy_rows<T>,
    .sum_heads = sum_heads<T>,
    .depthwise = depthwise_rows<T>,
    .depthwise_sums = depthwise_sums<T, S>,
    .couple = Couple<T>::forward,
    .couple_backward = Couple<T>::template backward<S>,
    .fill_rotation = fill_rotation<T>,
};

template <typename T, typename M>
const layers::cpu::Kernels* of_type(bool plain_sums) {
  return plain_sums ? &kTable<T, PlainGemm<T>, Real<T>> : &kTable<T, BlockedGemm<T, M>, double>;
}

}  // namespace

const layers::cpu::Kernels* layer_kernels(DType dtype, bool plain_sums);
const layers::cpu::Kernels* layer_kernels(DType dtype, bool plain_sums) {
  switch (dtype) {
    case DType::kF64: return &kTable<double, PlainGemm<double>, double>;
    case DType::kF32: return of_type<float, MatrixF32>(plain_sums);
    case DType::kF16: return of_type<F16, MatrixF32>(plain_sums);
    case DType::kBf16: return of_type<Bf16, MatrixBf16>(plain_sums);
    default: return nullptr;
  }
}

}  // namespace fovea::FOVEA_ISA
