// A layer of this library on a GPU as a contender. In a build without CUDA (absent.cc) there is
// none.
#pragma once

#include <memory>

#include "cli/layer_contender.h"

namespace fovea::cli {

// The tensors stay on the host and must outlive it; the GPU works on copies.
Result<std::unique_ptr<Contender>> open_cuda_layer(const PlannedLayer& layer,
                                                   harness::LayerTensors& tensors, Device device);

}  // namespace fovea::cli
