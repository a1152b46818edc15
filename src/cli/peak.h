// The most operations a second that a GPU's tensor cores do by its maker's data sheet. (The CPU's
// peak is measured: backend/cpu/isa.h.)
#pragma once

#include <optional>

#include "backend/backend.h"

namespace fovea::cli {

// Dense products with f32 sums; nothing where no figure is known for the GPU and dtype.
std::optional<double> gpu_peak_flops(const GpuInfo& gpu, DType dtype);

}  // namespace fovea::cli
