// The engine of a device.
#include "layers/engine.h"

#include "layers/cpu/engine.h"
#include "layers/cuda/make_engine.h"

namespace fovea::layers {

Result<std::unique_ptr<const LayerEngine>> make_engine(const DeviceInfo& device, DType dtype,
                                                       const EngineNeeds& needs) {
  return device.device.type == DeviceType::kCpu ? cpu::make_engine(device, dtype, needs)
                                                : cuda::make_engine(device, dtype, needs);
}

}  // namespace fovea::layers
