// The benchmark's table: a line per case and pass, each peer beside fovea, means at the bottom.
#pragma once

#include <string>

#include "cli/results.h"

namespace fovea::cli {

std::string summary(const Results& results);

}  // namespace fovea::cli
