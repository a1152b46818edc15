// CUDA errors as Status.
#pragma once

#include <cuda_runtime_api.h>

#include "fovea/status.h"

namespace fovea::cuda {

// `what` is the call that failed, as the message names it: "forward: launching the kernel".
Status to_status(cudaError_t error, const char* what);

}  // namespace fovea::cuda
