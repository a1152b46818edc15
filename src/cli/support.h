// What each engine of this build takes, found by asking it.
#pragma once

#include <string>

#include "fovea/status.h"

namespace fovea::cli {

Result<std::string> support_table();  // markdown: features down, backends across

}  // namespace fovea::cli
