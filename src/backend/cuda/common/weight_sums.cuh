// Between which sums of a row's weights may be trusted, where no score was looked at before it was
// weighed.
#pragma once

#include <cuda_fp16.h>

#include <type_traits>

namespace fovea::cuda {

constexpr float kMostWeightSum = 0x1p100f;

// Where weights refer to 0: those of smaller sums, rounded to T, would have lost digits or be 0.
template <typename T>
constexpr float kLeastWeightSum = std::is_same_v<T, __half> ? 0x1p-8f : 0x1p-100f;

}  // namespace fovea::cuda
