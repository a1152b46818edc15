// The Hopper forward kernels of this build, one entry per instance of the table in CMakeLists.txt.
#pragma once

#include <span>

#include "backend/cuda/hopper/forward/instance.h"

namespace fovea::cuda::hopper {

std::span<const ForwardKernel* const> forward_kernels();

}  // namespace fovea::cuda::hopper
