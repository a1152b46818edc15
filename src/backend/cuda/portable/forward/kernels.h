// The forward kernels of this build, one entry per instance of the table in CMakeLists.txt.
#pragma once

#include <span>

#include "backend/cuda/portable/forward/instance.h"

namespace fovea::cuda {

std::span<const ForwardKernel* const> forward_kernels();

}  // namespace fovea::cuda
