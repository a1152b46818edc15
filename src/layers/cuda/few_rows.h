// Products of few rows with a weight, by TMA and wgmma (compute capability 9.0). Such a product
// takes hardly longer than a launch: a library's, which begins when what is before it has ended,
// and ends before what follows begins, loses as much between them.
#pragma once

#include <cuda_runtime_api.h>

#include "fovea/tensor.h"

namespace fovea::layers::cuda {

struct FewRows {
  TensorView from;        // [batch, rows, in]; of the gradient [batch, rows, out]
  TensorView weight;      // [out, in]
  TensorView to;          // [batch, rows, out]; of the gradient [batch, rows, in]
  bool gradient = false;  // from outputs to inputs
  float scale = 1;
  double share = 1;           // of the multiprocessors; less than all: others are another product's
  bool settled = false;       // the weight was written before what was queued last
  bool leaves_early = false;  // the next kernel may take the room beside its blocks
};

// Whether the current device and the product are such, and rows so few that its blocks all run at
// once.
bool takes_few_rows(const FewRows& p);
cudaError_t launch_few_rows(const FewRows& p, cudaStream_t stream);

}  // namespace fovea::layers::cuda
