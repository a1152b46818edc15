// JSON as the program reads and writes it: members in the order in which they were written. One
// type for all, because each is a large part of what there is to compile.
#pragma once

#include <nlohmann/json_fwd.hpp>

namespace fovea::cli {

using Json = nlohmann::ordered_json;

}  // namespace fovea::cli
