// A plan of this library on a GPU as a contender. In a build without CUDA (absent.cc) there is
// none.
#pragma once

#include <memory>
#include <string>

#include "cli/contender.h"

namespace fovea::cli {

// The tensors stay on the host and must outlive it; the GPU works on copies. `backward`: that pass
// will be asked for too.
Result<std::unique_ptr<Contender>> open_cuda_contender(const Plan& plan,
                                                       harness::CaseTensors& tensors, Device device,
                                                       bool backward);

// "0000:3B:00.0", the name that nvidia-smi knows a GPU by too; empty when it cannot be told.
std::string cuda_bus_id(Device device);

}  // namespace fovea::cli
