// What this machine offers a plan: threads and instruction set.
#pragma once

#include "backend/backend.h"

namespace fovea {

inline constexpr int kMaxThreads = 1024;

// Threads a plan may use: those asked for, else those of the environment variable, else the cores
// this process may run on. `variable` is the text of FOVEA_NUM_THREADS, or null.
Result<int> thread_count(int asked, const char* variable, int cores);

Result<DeviceInfo> discover(Device device, const PlanOptions& options);

}  // namespace fovea
