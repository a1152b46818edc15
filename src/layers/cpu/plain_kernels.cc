// The kernels of f64 and those whose sums are plain ones: what others are held against, for which
// the instruction set that every machine has will do.
#include "layers/cpu/gemm_plain.h"
#include "layers/cpu/kernel_table.h"

namespace fovea::FOVEA_ISA {

const layers::cpu::Kernels* plain_layer_kernels(DType dtype);
const layers::cpu::Kernels* plain_layer_kernels(DType dtype) {
  switch (dtype) {
    case DType::kF64: return &kTable<double, PlainGemm<double>, double>;
    case DType::kF32: return &kTable<float, PlainGemm<float>, Real<float>>;
    case DType::kF16: return &kTable<F16, PlainGemm<F16>, Real<F16>>;
    case DType::kBf16: return &kTable<Bf16, PlainGemm<Bf16>, Real<Bf16>>;
    default: return nullptr;
  }
}

}  // namespace fovea::FOVEA_ISA
