// Products over taps in which every channel meets every other, by the matrix units of Hopper: as
// tap_product.cuh, of 16-bit elements, with several times the rate of mma.sync.
#pragma once

#include "layers/cuda/tap_product.h"

namespace fovea::layers::cuda {

// Whether the current device and a product of T are such, and the product is large enough.
template <typename T>
bool takes_dense(const TapProduct& a);

template <typename T>
cudaError_t launch_dense(const TapProduct& a, cudaStream_t stream);

}  // namespace fovea::layers::cuda
