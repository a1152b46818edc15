// Plans of layers, whichever kind: found by their options and sizes, made once and kept.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fovea/layers.h"

namespace fovea::torch_ops {

using Views = std::vector<TensorView>;

// A layer's plan behind one type. Weights come as a list, in the order of the members of its
// Weights struct (fovea/layers.h); those that its options leave out are left out there too.
class BoundLayer {
 public:
  virtual ~BoundLayer() = default;
  virtual double dropout() const = 0;
  virtual size_t workspace_bytes(Pass pass) const = 0;
  virtual size_t saved_bytes() const = 0;
  // The cache's tensors, in the order k, v, conv, shift, as one cache of the given length.
  virtual LayerCache cache_over(const Views& tensors, int64_t length) const = 0;

  virtual Status forward(const LayerInputs& inputs, const Views& weights, const TensorView& out,
                         LayerCache* cache, Workspace workspace, Saved saved,
                         Stream stream) const = 0;
  // gradients: of query, key, value, and the weights; not given: not wanted.
  virtual Status backward(const LayerInputs& inputs, const Views& weights, const TensorView& dout,
                          const Views& gradients, Workspace workspace, Saved saved,
                          Stream stream) const = 0;
};

// Throws what torch turns into a RuntimeError where there is no such layer.
std::shared_ptr<const BoundLayer> find_layer(const std::string& options, const LayerShape& shape,
                                             Device device);

}  // namespace fovea::torch_ops
