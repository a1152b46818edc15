// The Hopper backward kernels of this build, one entry per instance of the table in CMakeLists.txt.
#pragma once

#include <span>

#include "backend/cuda/hopper/backward/instance.h"

namespace fovea::cuda::hopper {

std::span<const BackwardKernel* const> backward_kernels();

}  // namespace fovea::cuda::hopper
