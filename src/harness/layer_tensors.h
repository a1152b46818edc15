// The tensors of a layer's case, dense, in the host's memory.
//
//   LayerTensors tensors(c, /*sample=*/64);
//   auto layer = make_any_layer(c, LayerUse::kTraining, Device::cpu());
//   Status done = (*layer)->forward(tensors.views(), workspace, saved);
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "harness/layer_case.h"
#include "harness/tensors.h"

namespace fovea::harness {

struct LayerWeight {
  std::string name;
  TensorView view;
  TensorView gradient;  // like view
};

struct LayerViews {
  TensorView x;     // [batch, q_len, embed_dim]
  TensorView out;   // like x
  TensorView dout;  // like x
  // dout of the first tokens of the first sequence and 0 elsewhere: gradients from it are those of
  // that part alone, since no token sees a later one or another sequence.
  TensorView sampled_dout;  // like x
  TensorView dx;            // like x
  std::vector<LayerWeight> weights;

  void for_each(const std::function<void(TensorView&)>& visit);
};

class LayerTensors {
 public:
  // `sample` tokens for sampled_dout; 0: none is wanted.
  LayerTensors(const LayerCase& c, int64_t sample);

  const LayerViews& views() const { return views_; }
  void poison_outputs();  // NaN into out and every gradient
  size_t bytes() const;   // of all tensors together
  std::vector<const GuardedBuffer*> buffers() const;

 private:
  TensorView add(DType dtype, const std::vector<int64_t>& sizes);
  void add_gradients(const LayerCase& c, int64_t sample);

  std::vector<GuardedBuffer> owned_;
  LayerViews views_;
};

}  // namespace fovea::harness
