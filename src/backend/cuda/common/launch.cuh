// Launching of kernels. Where the GPU can, a kernel begins while the one before it in the stream is
// ending, so that the time to launch it is hidden; it calls ptx::wait_for_earlier_kernels before it
// touches memory.
#pragma once

#include <cuda_runtime.h>

#include "backend/cuda/common/prepared_kernel.h"

namespace fovea::cuda {

struct Launch {
  dim3 blocks;
  int threads = 0;
  int shared_bytes = 0;  // dynamic
  cudaStream_t stream = nullptr;
};

template <auto kKernel>
inline PreparedKernel prepared_kernel;

// A kernel always comes with the same number of shared bytes.
template <auto kKernel, typename... Arguments>
cudaError_t launch(const Launch& how, const Arguments&... arguments) {
  bool begins_early = false;
  if (const cudaError_t error = prepared_kernel<kKernel>.on_current_device(
          reinterpret_cast<const void*>(kKernel), how.shared_bytes, begins_early);
      error != cudaSuccess) {
    return error;
  }
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = how.blocks;
  config.blockDim = dim3(static_cast<unsigned>(how.threads));
  config.dynamicSmemBytes = static_cast<size_t>(how.shared_bytes);
  config.stream = how.stream;
  config.attrs = &early;
  config.numAttrs = begins_early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kKernel, arguments...);
}

}  // namespace fovea::cuda
