// The merge of partial results that lie on a GPU.
#pragma once

#include "fovea/attention.h"

namespace fovea {

// As fovea::merge, of tensors that api/ has checked and that hold at least one row. Queued on the
// stream; nothing is allocated or waited for. More parts than one launch takes are joined in turns,
// the result of one being a part of the next, each rounded to out's dtype.
Status cuda_merge(const PartialResult* parts, int64_t count, const TensorView& out,
                  const TensorView& lse, Stream stream);

}  // namespace fovea
