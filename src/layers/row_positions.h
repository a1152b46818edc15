// Where the rows of a tensor stand in their sequences.
#pragma once

#include "fovea/tensor.h"

namespace fovea::layers {

// At ids [batch|1, rows] i32, or counted on from `first`.
struct RowPositions {
  TensorView ids;
  int64_t first = 0;
};

}  // namespace fovea::layers
