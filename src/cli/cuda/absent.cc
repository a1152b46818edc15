// A build without CUDA: no contender, no GPU to name.
#include "cli/cuda/contender.h"

namespace fovea::cli {

Result<std::unique_ptr<Contender>> open_cuda_contender(const Plan&, harness::CaseTensors&, Device,
                                                       bool) {
  return Status(StatusCode::kUnsupported, "this build has no CUDA");
}

std::string cuda_bus_id(Device) { return {}; }

}  // namespace fovea::cli
