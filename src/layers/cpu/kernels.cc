// The layers' kernels of one instruction set: this file is compiled once for each.
#include "layers/cpu/gemm_blocked.h"
#include "layers/cpu/kernel_table.h"
#include "prim/cpu/matrix_of_isa.h"

#ifdef FOVEA_FLOATS_OF
namespace fovea::FOVEA_FLOATS_OF {
const layers::cpu::Kernels* layer_kernels(DType dtype);
}
#endif

namespace fovea::FOVEA_ISA {

const layers::cpu::Kernels* layer_kernels(DType dtype);
const layers::cpu::Kernels* layer_kernels(DType dtype) {
  switch (dtype) {
#ifdef FOVEA_FLOATS_OF
    case DType::kF32:
    case DType::kF16: return FOVEA_FLOATS_OF::layer_kernels(dtype);
#else
    case DType::kF32: return &kTable<float, BlockedGemm<float, MatrixF32>, double>;
    case DType::kF16: return &kTable<F16, BlockedGemm<F16, MatrixF32>, double>;
#endif
    case DType::kBf16: return &kTable<Bf16, BlockedGemm<Bf16, MatrixBf16>, double>;
    default: return nullptr;
  }
}

}  // namespace fovea::FOVEA_ISA
