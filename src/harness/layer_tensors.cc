// Tensors of a layer.
#include "harness/layer_tensors.h"

#include <cstring>

#include "harness/chunks.h"
#include "harness/layer_weights.h"
#include "harness/random.h"

namespace fovea::harness {
namespace {

size_t bytes_of(const TensorView& t) {
  return static_cast<size_t>(t.elements() * dtype_bytes(t.dtype));
}

void fill_normal(const TensorView& t, double deviation, uint64_t key) {
  const TensorView row = flat(t);
  for_chunks(row.elements(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      write_element(row, deviation * normal(hash64(key + static_cast<uint64_t>(i))), i);
    }
  });
}

void fill_constant(const TensorView& t, double value) {
  const TensorView row = flat(t);
  for (int64_t i = 0; i < row.elements(); ++i) write_element(row, value, i);
}

void poison_whole(const TensorView& t) {
  if (t.given()) std::memset(t.data, kPoisonByte, bytes_of(t));
}

}  // namespace

void LayerViews::for_each(const std::function<void(TensorView&)>& visit) {
  for (TensorView* view : {&x, &out, &dout, &sampled_dout, &dx}) visit(*view);
  for (LayerWeight& weight : weights) {
    visit(weight.view);
    visit(weight.gradient);
  }
}

LayerTensors::LayerTensors(const LayerCase& c, int64_t sample) {
  uint64_t tensor = 0;
  const auto draw = [&](const TensorView& view, double deviation) {
    fill_normal(view, deviation, hash64(hash64(c.seed) + tensor++));
  };
  const std::vector<int64_t> rows = {c.batch, c.q_len, c.embed_dim};
  views_.x = add(c.dtype, rows);
  draw(views_.x, 1);
  views_.out = add(c.dtype, rows);
  for (const WeightShape& shape : weight_shapes(c)) {
    views_.weights.push_back({shape.name, add(c.dtype, shape.sizes), {}});
    const TensorView& view = views_.weights.back().view;
    if (shape.constant) {
      fill_constant(view, *shape.constant);
    } else {
      draw(view, shape.deviation);
    }
  }
  if (c.training) {
    views_.dout = add(c.dtype, rows);
    draw(views_.dout, 1);
    add_gradients(c, sample);
  }
  poison_outputs();
}

void LayerTensors::add_gradients(const LayerCase& c, int64_t sample) {
  const std::vector<int64_t> rows = {c.batch, c.q_len, c.embed_dim};
  if (sample > 0) {
    views_.sampled_dout = add(c.dtype, rows);
    std::memset(views_.sampled_dout.data, 0, bytes_of(views_.sampled_dout));
    std::memcpy(views_.sampled_dout.data, views_.dout.data,
                static_cast<size_t>(sample * c.embed_dim * dtype_bytes(c.dtype)));
  }
  views_.dx = add(c.dtype, rows);
  for (LayerWeight& weight : views_.weights) {
    const TensorView& view = weight.view;
    weight.gradient = add(c.dtype, {view.sizes.begin(), view.sizes.begin() + view.rank});
  }
}

TensorView LayerTensors::add(DType dtype, const std::vector<int64_t>& sizes) {
  TensorView view;
  view.dtype = dtype;
  view.rank = static_cast<int>(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    view.sizes[i] = sizes[i];
    view.strides[i] = stride;
    stride *= sizes[i];
  }
  owned_.emplace_back(bytes_of(view));
  view.data = owned_.back().data();
  return view;
}

void LayerTensors::poison_outputs() {
  poison_whole(views_.out);
  poison_whole(views_.dx);
  for (const LayerWeight& weight : views_.weights) poison_whole(weight.gradient);
}

size_t LayerTensors::bytes() const {
  size_t sum = 0;
  for (const GuardedBuffer& buffer : owned_) sum += buffer.bytes();
  return sum;
}

std::vector<const GuardedBuffer*> LayerTensors::buffers() const {
  std::vector<const GuardedBuffer*> all;
  for (const GuardedBuffer& buffer : owned_) all.push_back(&buffer);
  return all;
}

}  // namespace fovea::harness
