// The Hopper engine: wgmma, TMA and warp specialisation, on GPUs of compute capability 9.0. Its
// backward pass, and calls whose tensors TMA does not take, are the portable engine's.
#pragma once

#include "backend/backend.h"

namespace fovea::cuda {

const Backend& hopper_backend();

}  // namespace fovea::cuda
