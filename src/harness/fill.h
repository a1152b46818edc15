// The values of a case's inputs: each element depends on the seed, the tensor and its logical index
// alone, so that the same case in another memory order holds the same numbers.
#pragma once

#include "harness/case.h"

namespace fovea::harness {

enum class InputName { kQ, kK, kV, kDout, kBias, kMask, kAlibi, kSink, kDlse };

void fill_input(const TensorView& view, InputName name, const Case& c);

}  // namespace fovea::harness
