// The portable CUDA engine: tensor cores through mma.sync, on every GPU since Ampere.
#pragma once

#include "backend/backend.h"

namespace fovea::cuda {

const Backend& portable_backend();

}  // namespace fovea::cuda
