// The text of a CUDA error.
#include "backend/cuda/common/error.h"

#include <string>

namespace fovea::cuda {
namespace {

StatusCode code_of(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation: return StatusCode::kOutOfMemory;
    // Nothing is wrong with the request: this build, driver or device cannot serve it.
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorInsufficientDriver:
    case cudaErrorNotSupported: return StatusCode::kUnsupported;
    default: return StatusCode::kInternal;
  }
}

}  // namespace

Status to_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();  // told here, so not once more by the next call
  std::string text =
      std::string(what) + ": " + cudaGetErrorName(error) + ", " + cudaGetErrorString(error);
  if (error == cudaErrorNoKernelImageForDevice) {
    text += " (FOVEA_CUDA_ARCHITECTURES chooses what a build has code for)";
  }
  return {code_of(error), std::move(text)};
}

}  // namespace fovea::cuda
