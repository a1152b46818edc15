// Devices as the command line names them.
#pragma once

#include <string>

#include "fovea/device.h"
#include "fovea/status.h"

namespace fovea::cli {

// "cpu", "cuda" (the first GPU) or "cuda:N"; `command` opens the message of a refusal.
Result<Device> parse_device(const std::string& command, const std::string& text);

// The first GPU where this build and this machine have one, else the CPU.
Device best_device();

}  // namespace fovea::cli
