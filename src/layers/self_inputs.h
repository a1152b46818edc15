// The inputs of layers that attend to their own query.
#pragma once

#include "layers/check_call.h"

namespace fovea::layers {

// key and value may be given as layer(x, x, x) would: then they are query itself, never a mask.
void check_self_inputs(CallCheck& check, const LayerInputs& in, const RowDims& dims);

// A mask of scores, positions of tokens, and none of keys besides.
void check_self_positions(CallCheck& check, const LayerInputs& in, const LayerShape& shape,
                          int64_t heads, int64_t keys);

void check_no_key_gradients(CallCheck& check, const TensorView& dkey, const TensorView& dvalue);

}  // namespace fovea::layers
