// Tensors as TMA is told about them.
#pragma once

#include <cuda.h>

#include "fovea/tensor.h"
#include "prim/cuda/tile/swizzled.h"

namespace fovea::cuda::hopper {

// Whether TMA takes a [batch, row, head, dim] tensor or its packed form [row, head, dim]: it is not
// empty, and rows begin on 16 bytes and lie apart.
bool takes_map(const TensorView& t);

// A map of a tensor that is taken, as {dim, row, head, batch}, with boxes of 64 values of `rows`
// rows in the 128-byte swizzle, or of 32 in the 64-byte one.
CUresult encode_map(CUtensorMap& map, const TensorView& t, int rows,
                    int columns = tile::kPanelColumns);

}  // namespace fovea::cuda::hopper
