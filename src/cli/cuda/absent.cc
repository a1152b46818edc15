// A build without CUDA: no contender, no GPU to name.
#include "cli/cuda/contender.h"
#include "cli/cuda/layer_contender.h"

namespace fovea::cli {
namespace {

Status absent() { return {StatusCode::kUnsupported, "this build has no CUDA"}; }

}  // namespace

Result<std::unique_ptr<Contender>> open_cuda_contender(const Plan&, harness::CaseTensors&, Device,
                                                       bool) {
  return absent();
}

Result<std::unique_ptr<Contender>> open_cuda_layer(const PlannedLayer&, harness::LayerTensors&,
                                                   Device) {
  return absent();
}

std::string cuda_bus_id(Device) { return {}; }

}  // namespace fovea::cli
