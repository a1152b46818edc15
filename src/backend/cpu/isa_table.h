// Every instruction set this build has code for, best first.
#pragma once

#include <span>
#include <string>

#include "backend/cpu/kernels.h"

namespace fovea::cpu {

struct IsaEntry {
  const char* name;
  const Kernels* (*kernels)(DType dtype);  // null for a type the engine does not take
};

std::span<const IsaEntry> isa_table();

// Null when this machine cannot run that instruction set.
const Kernels* kernels_for(const std::string& isa, DType dtype);

}  // namespace fovea::cpu
