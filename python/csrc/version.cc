// The op fovea::version.
#include "fovea/version.h"

#include <string>

#include "ops.h"
#include "torch_tensor.h"

namespace fovea::torch_ops {

void version(StableIValue* stack, uint64_t, uint64_t) {
  give_back(stack, std::string(fovea::version()));
}

}  // namespace fovea::torch_ops
