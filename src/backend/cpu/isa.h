// The instruction sets the CPU engine is compiled for, and which of them this machine has.
#pragma once

#include <string>
#include <vector>

#include "fovea/tensor.h"

namespace fovea {

// Names of the instruction sets this machine can run, best first: amx, avx512bf16, avx512, avx2 on
// x86; neon-bf16, neon on Arm; elsewhere, and last on x86, baseline.
const std::vector<std::string>& cpu_isas();

// The one a new plan uses: the environment variable FOVEA_ISA where it is set, even to a name this
// machine does not have (make_plan then refuses), otherwise the best.
std::string cpu_isa_name();

// FLOP/s of the matrix instructions that the engine uses for this type on this machine, measured
// now, which takes 30 ms. Whoever else uses the cores then takes from it.
double cpu_peak_flops(DType dtype, int threads);

}  // namespace fovea
