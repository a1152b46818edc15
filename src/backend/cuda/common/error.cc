// The text of a CUDA error.
#include "backend/cuda/common/error.h"

#include <string>

namespace fovea::cuda {

Status to_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  const StatusCode code =
      error == cudaErrorMemoryAllocation ? StatusCode::kOutOfMemory : StatusCode::kInternal;
  return {code,
          std::string(what) + ": " + cudaGetErrorName(error) + ", " + cudaGetErrorString(error)};
}

}  // namespace fovea::cuda
