// What the steps of CCGQA take besides tensors, each for as long as it lasts.
#pragma once

#include "layers/layer.h"

namespace fovea::layers {

// The last step beside which the gradient of the output's weight may still be on its way.
int output_weight_until(const LayerEngine& engine, const Prologue& sizes);

struct CcgqaScratch {
  Slot project, output, prologue[2];                  // of prologues that are not by p.work alone
  Slot dheads, dout_weight, dproject_weight, dquery;  // of backward's products
  // Of the device: what gradients of weights count on, and what the output's leaves to others.
  double share_aside = 1;
  double share_beside() const { return share_aside < 1 ? 1 - share_aside : 1; }
  // The projection's is the last to begin, and x's gradient, which begins later still, finds the
  // multiprocessors that it leaves.
  double share_last() const { return share_aside < 1 ? 0.6 * share_aside : 1; }

  // By the sizes of query, attention's output, z's tokens and their gradient; of `sizes` all but z.
  Status make(LayerParts& layer, const TensorView& x, const TensorView& heads, const TensorView& z,
              const TensorView& dz, const Prologue& sizes);
  PrologueWork work_at(const Memory& at, Pass pass) const;

 private:
  Status make_work(LayerParts& layer, const Prologue& sizes, Pass pass);

  std::array<Slot, kMostWork> work_[2];  // the prologue's own; forward, backward
};

}  // namespace fovea::layers
