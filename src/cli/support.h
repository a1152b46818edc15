// What each engine and layer of this build takes, found by asking it.
#pragma once

#include <string>

#include "fovea/status.h"

namespace fovea::cli {

Result<std::string> support_table();  // markdown: features down, backends across
std::string layer_support_table();    // markdown: layers down, types and uses across

}  // namespace fovea::cli
