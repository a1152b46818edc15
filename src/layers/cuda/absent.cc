// A build without what layers on a GPU are made of.
#include "base/refusal.h"
#include "layers/cuda/make_engine.h"

namespace fovea::layers::cuda {

Result<std::unique_ptr<const LayerEngine>> make_engine(const DeviceInfo& device, DType,
                                                       const EngineNeeds&) {
  return unsupported("make_layer", "layers do not run on " + show(device.device),
                     {{"cuda",
                       {"this library was built without cublasLt.h, which comes with the CUDA "
                        "toolkit or with the Python package nvidia-cublas"}}});
}

}  // namespace fovea::layers::cuda
