// What this machine offers a plan: threads and instruction set.
#pragma once

#include "backend/backend.h"

namespace fovea {

inline constexpr int kMaxThreads = 1024;

// Threads a plan may use: those asked for, else those of the environment variable, else the cores
// this process may run on. `variable` is the text of FOVEA_NUM_THREADS, or null.
Result<int> thread_count(int asked, const char* variable, int cores);

// Multiprocessors of a GPU that a plan may count on: those that there are, or fewer where the
// environment says so, for a process that shares them. `variable` is the text of FOVEA_SM_COUNT.
Result<int> sm_count(const char* variable, int there);

Result<DeviceInfo> discover(Device device, const PlanOptions& options);

}  // namespace fovea
