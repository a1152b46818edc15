// What the Hopper backward kernel is handed.
#pragma once

#include <cuda.h>

#include "backend/cuda/portable/backward/arguments.h"

namespace fovea::cuda::hopper {

struct BackwardArguments {
  CUtensorMap q, dout;  // boxes of all columns and a stage's rows
  cuda::BackwardArguments a;
};

}  // namespace fovea::cuda::hopper
