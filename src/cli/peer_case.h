// A case as a peer's process gets to know it.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/bench_pass.h"
#include "cli/json.h"
#include "fovea/tensor.h"

namespace fovea::cli {

struct PeerTensor {
  std::string name;
  TensorView view;
};

struct PeerInput : PeerTensor {
  std::string distribution{};  // by which it may be drawn there: "normal", "mask"; empty: never
  double deviation = 1;        // of "normal"
};

struct PeerCase {
  Json description;
  std::vector<PeerInput> inputs;
  // Where the outputs of a pass go, by the names that the peer gives them.
  std::function<std::vector<PeerTensor>(BenchPass)> outputs;
};

}  // namespace fovea::cli
