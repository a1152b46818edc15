// A call of the prologue as its kernels' arguments, and where in scratch their results lie.
#pragma once

#include "layers/cuda/head_conv.cuh"
#include "layers/cuda/prologue.h"
#include "layers/cuda/sums.cuh"
#include "layers/cuda/tap_product.h"
#include "layers/cuda/tile_backward.cuh"
#include "layers/cuda/tile_gradients.cuh"
#include "layers/cuda/tokens_backward.cuh"
#include "layers/cuda/weight_gradient.cuh"
#include "layers/cuda/whole_forward.cuh"

namespace fovea::layers::cuda {

class Cut;

struct ForwardPlan {
  TileForward tiles;   // blocks: it is all that is launched
  WholeForward whole;  // the same
  Before before;
  TapProduct first, second;  // no blocks: the convolution is none, or another step does it
  HeadConv heads;            // in place of the first product
  FinishAlone finish;        // no columns: the second product ends so
};
// Where `cut` only counts, the plan means nothing.
ForwardPlan plan_forward(const Prologue& p, const RopeTable& rope, Cut& cut);

struct BackwardPlan {
  const SideStream* side = nullptr;  // for gradients of weights
  TileBackward tiles;                // blocks: in place of `after` and of both products
  TileGradients tile_gradients;      // blocks: in place of `weights` and `sums`
  After after;
  ValuesBack values;
  TapProduct second, first;  // to du, and to dz
  HeadConv heads;            // in place of the first product
  TapProduct again;          // to u once more
  HeadConv heads_again;      // in its place
  Spread spread;             // no channels: the first product leads to dz
  WeightGradients weights;
  const DenseGradients* others = nullptr;  // who makes the following
  int dense_count = 0;
  DenseGradient dense[2];
  ColumnSums columns;
  PartSums sums;
};
BackwardPlan plan_backward(const Prologue& p, const PrologueGradients& g, const RopeTable& rope,
                           Cut& cut, const DenseGradients* dense = nullptr);

// Whether blocks come in clusters on this device, in code that was compiled for them.
template <typename T>
bool has_clusters();

// The plans' launches, in a type of elements each; see prologue_run.cuh.
template <typename T>
cudaError_t run(const ForwardPlan& plan, cudaStream_t stream);
template <typename T>
cudaError_t run(const BackwardPlan& plan, cudaStream_t stream);

}  // namespace fovea::layers::cuda
