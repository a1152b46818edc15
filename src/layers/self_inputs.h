// The inputs of layers that attend to their own query.
#pragma once

#include "layers/check_call.h"

namespace fovea::layers {

// key and value may be given as layer(x, x, x) would: then they are query itself, never a mask.
void check_self_inputs(CallCheck& check, const LayerInputs& in, const RowDims& dims);

void check_self_gradients(CallCheck& check, const TensorView& dquery, const TensorView& dkey,
                          const TensorView& dvalue, const RowDims& dims);

}  // namespace fovea::layers
