// The layers' engine of a CUDA device, in builds with and without one.
#pragma once

#include "layers/engine.h"

namespace fovea::layers::cuda {

Result<std::unique_ptr<const LayerEngine>> make_engine(const DeviceInfo& device, DType dtype,
                                                       const EngineNeeds& needs);

}  // namespace fovea::layers::cuda
