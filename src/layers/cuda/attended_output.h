// Attention of few tokens and the projection of its output in one kernel (compute capability 9.0).
// Either alone takes hardly longer than what lies between two launches.
#pragma once

#include <cuda_runtime_api.h>

#include "backend/backend.h"
#include "layers/projection.h"

namespace fovea::layers::cuda {

// Whether the device and the step are such, and tokens so few that each block has a multiprocessor.
bool takes_attended_output(const AttendedOutput& p, const GpuInfo& gpu);
cudaError_t launch_attended_output(const AttendedOutput& p, cudaStream_t stream);

}  // namespace fovea::layers::cuda
