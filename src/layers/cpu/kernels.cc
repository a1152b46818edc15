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

template <typename T, typename G>
constexpr layers::cpu::Kernels kTable = {
    .shared_scratch = G::kSharedScratch,
    .worker_scratch = G::kWorkerScratch,
    .gemm = G::run,
    .rotate = rotate_rows<T>,
    .normalise = normalise_rows<T>,
    .normalise_backward = normalise_rows_backward<T>,
    .column_sums = column_sums<T>,
    .store_sums = store_sums<T>,
    .copy = copy_rows<T>,
    .sum_heads = sum_heads<T>,
    .depthwise = depthwise_rows<T>,
    .depthwise_sums = depthwise_sums<T>,
    .couple = Couple<T>::forward,
    .couple_backward = Couple<T>::backward,
    .fill_rotation = fill_rotation<T>,
};

}  // namespace

const layers::cpu::Kernels* layer_kernels(DType dtype);
const layers::cpu::Kernels* layer_kernels(DType dtype) {
  switch (dtype) {
    case DType::kF64: return &kTable<double, PlainGemm<double>>;
    case DType::kF32: return &kTable<float, BlockedGemm<float, MatrixF32>>;
    case DType::kF16: return &kTable<F16, BlockedGemm<F16, MatrixF32>>;
    case DType::kBf16: return &kTable<Bf16, BlockedGemm<Bf16, MatrixBf16>>;
    default: return nullptr;
  }
}

}  // namespace fovea::FOVEA_ISA
