// The layers' kernels by instruction set.
#pragma once

#include <string>

#include "layers/cpu/kernels.h"

namespace fovea::layers::cpu {

// Null when this machine cannot run that instruction set, or for a type that layers do not take.
const Kernels* kernels_for(const std::string& isa, DType dtype, bool plain_sums);

}  // namespace fovea::layers::cpu
