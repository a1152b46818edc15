// What lies between the input and output projections of the classic layers: position, qk_norm,
// cache, attention. q, k, v are [batch, rows, heads, dim] views of wherever they were projected to.
#pragma once

#include "layers/layer.h"

namespace fovea::layers {

struct HeadTensors {
  TensorView q, k, v;
};

struct HeadSizes {
  int64_t heads = 0, heads_kv = 0, dim = 0;
};

class Heads {
 public:
  // Plans attention and the tensors of this middle part; options and shape have been checked.
  Status make(LayerParts& parts, const LayerOptions& options, const HeadSizes& sizes,
              const PlanOptions& plan);

  static EngineNeeds needs(const LayerOptions& options, const LayerShape& shape, int64_t head_dim,
                           int64_t sums);
  LayerCache cache_views(const LayerParts& parts) const;
  void check_norm(CallCheck& check, CallCheck::Weights kind, const QkNormWeights& norm) const {
    check.qk_norm(kind, qk_norm_, sizes_.dim, norm);
  }
  void check_inputs(CallCheck& check, const LayerParts& parts, const LayerInputs& in) const;

  // Turns q and k where they lie. Gives the heads' outputs, [batch, q_len, heads * dim].
  TensorView forward(Run& run, const LayerParts& parts, const Memory& at, const LayerInputs& in,
                     const QkNormWeights& norm, const HeadTensors& t, LayerCache* cache) const;
  // As forward left it.
  TensorView output(const Memory& at) const { return at.at(out_); }
  // Writes the gradients of the projected q, k, v into g; dout is like output.
  void backward(Run& run, const LayerParts& parts, const Memory& at, const LayerInputs& in,
                const QkNormWeights& norm, const QkNormWeights& dnorm, const HeadTensors& t,
                const TensorView& dout, const HeadTensors& g) const;

 private:
  struct Positions {
    RowPositions q, k;
  };
  Positions positions(const LayerParts& parts, const LayerInputs& in, int64_t past) const;
  Norm norm_of(const TensorView& weight, const TensorView& bias) const {
    return {qk_norm_, norm_eps_, weight, bias};
  }

  HeadSizes sizes_;
  QkNorm qk_norm_ = QkNorm::kNone;
  double norm_eps_ = 0;
  bool rope_ = false;
  Slot q_normed_, k_normed_;  // with qk_norm; saved
  Slot out_;                  // saved
};

}  // namespace fovea::layers
