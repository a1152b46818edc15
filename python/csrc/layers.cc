// The ops of the layers: fovea::layer, layer_backward, layer_cached and layer_saved_bytes.
#include <iterator>
#include <stdexcept>
#include <string>

#include "layer_plans.h"
#include "ops.h"
#include "torch_tensor.h"

namespace fovea::torch_ops {
namespace {

// What every pass is told, in the order of the schemas in ops.cc.
struct LayerRequest {
  Viewed query, key, value;
  Viewed mask, position_ids, key_position_ids;
  std::vector<Viewed> weights;
  std::optional<Tensor> dropout_seed;
  std::string options;
};

std::vector<Viewed> take_list(Arguments& arguments) {
  std::vector<Viewed> list;
  for (Tensor& tensor : arguments.take<std::vector<Tensor>>()) {
    list.push_back({std::move(tensor), {}});
  }
  return list;
}

LayerRequest take_layer(Arguments& arguments) {
  LayerRequest r;
  r.query.tensor = arguments.take<Tensor>();
  for (Viewed* optional : {&r.key, &r.value, &r.mask, &r.position_ids, &r.key_position_ids}) {
    optional->tensor = arguments.take<std::optional<Tensor>>();
  }
  r.weights = take_list(arguments);
  r.dropout_seed = arguments.take<std::optional<Tensor>>();
  r.options = arguments.take<std::string>();
  return r;
}

Views views_of(const char* name, std::vector<Viewed>& list) {
  Views views;
  for (Viewed& one : list) {
    make_view(name, one);
    views.push_back(one.view);
  }
  return views;
}

// Weights of convolutions are read as they lie when they are dense.
Views weights_of(std::vector<Viewed>& list) {
  Views views = views_of("weights", list);
  for (size_t i = 0; i < list.size(); ++i) {
    const TensorView& w = views[i];
    if (w.rank != 3) continue;
    const int64_t taps = w.sizes[2];
    if (w.strides[1] == taps && w.strides[0] == w.sizes[1] * taps) continue;
    make_view_of_copy("weights", list[i]);
    views[i] = list[i].view;
  }
  return views;
}

// A tensor [batch, rows, width] that is read by products. A GPU's walk rows that lie apart, and sum
// a gradient of weights over those of all members only where these follow each other alike: what
// does not (the gradient of a sum, a batch that is not first) is copied. The CPU's walk anything.
void make_rows_view(const char* name, Viewed& of, LayerUse use) {
  make_view(name, of);
  const TensorView& view = of.view;
  if (!view.given() || view.rank != 3 || view.device.type == DeviceType::kCpu) return;
  const int64_t batch = view.sizes[0], rows = view.sizes[1], width = view.sizes[2];
  const bool apart = (rows <= 1 || view.strides[1] >= width) &&
                     (batch <= 1 || rows != 1 || view.strides[0] >= width);
  const bool alike = batch <= 1 || rows <= 1 || view.strides[0] == rows * view.strides[1];
  if (apart && (alike || use != LayerUse::kTraining)) return;
  make_view_of_copy(name, of);
}

// A request that was read, with its plan. Results are new tensors, which lend their memory where
// none is left out.
struct Call {
  Call(LayerRequest& r, LayerUse use, bool lends = true, bool spends = false)
      : weights(weights_of(r.weights)) {
    make_rows_view("query", r.query, use);
    make_rows_view("key", r.key, use);
    make_rows_view("value", r.value, use);
    make_view("mask", r.mask);
    make_view("position_ids", r.position_ids);
    make_view("key_position_ids", r.key_position_ids);
    inputs.query = r.query.view, inputs.key = r.key.view, inputs.value = r.value.view;
    inputs.mask = r.mask.view;
    inputs.position_ids = r.position_ids.view;
    inputs.key_position_ids = r.key_position_ids.view;
    const TensorView& query = inputs.query;
    const TensorView& keys = inputs.key.given() ? inputs.key : inputs.value;
    if (query.rank != 3) {
      throw std::runtime_error("fovea: layer: query.rank is " + std::to_string(query.rank) +
                               ", must be 3");
    }
    shape.batch = query.sizes[0], shape.q_len = query.sizes[1];
    if (keys.given()) shape.kv_len = keys.sizes[1];
    shape.use = use;
    shape.masked = inputs.mask.given();
    shape.lends = lends;
    shape.spends = spends;
    layer = find_layer(r.options, shape, query.device);
    inputs.dropout = read_dropout_seed(r.dropout_seed, layer->dropout());
  }

  Device device() const { return inputs.query.device; }

  LayerInputs inputs;
  Views weights;
  LayerShape shape;
  std::shared_ptr<const BoundLayer> layer;
};

// Whether a gradient of each of query, key, value and the weights that there are is wanted.
bool wants_all(const LayerRequest& r, const std::vector<bool>& wanted) {
  const bool given[] = {true, r.key.tensor.has_value(), r.value.tensor.has_value()};
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (!wanted[i] && (i >= std::size(given) || given[i])) return false;
  }
  return true;
}

Viewed run_forward(const Call& call, LayerCache* cache, Saved saved) {
  Viewed out = empty_like(call.inputs.query);
  const Scratch scratch(call.layer->workspace_bytes(Pass::kForward), call.device());
  raise_unless_ok(call.layer->forward(call.inputs, call.weights, out.view, cache,
                                      scratch.workspace(), saved, current_stream(call.device())));
  return out;
}

// A copy would take the new tokens.
void refuse_copy_of_cache(const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  if (last < 0 || tensor.size(last) <= 1 || tensor.stride(last) == 1) return;
  throw std::runtime_error("fovea: layer_cached: the last stride of a cache's tensor is " +
                           std::to_string(tensor.stride(last)) + ", must be 1");
}

// Memory between a forward pass and its backward pass is of no type.
Saved saved_in(const Tensor& memory) {
  return {memory.data_ptr(), static_cast<size_t>(memory.numel())};
}

}  // namespace

void layer(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  LayerRequest r = take_layer(arguments);
  const auto saved_bytes = arguments.take<int64_t>();
  const Call call(r, saved_bytes > 0 ? LayerUse::kTraining : LayerUse::kInference);
  const Tensor saved = empty_bytes(saved_bytes, call.device());
  const Viewed out = run_forward(call, nullptr, saved_bytes > 0 ? saved_in(saved) : Saved{});
  give_back(stack, *out.tensor, saved);
}

void layer_backward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Viewed dout;
  dout.tensor = arguments.take<Tensor>();
  const auto saved = arguments.take<Tensor>();
  LayerRequest r = take_layer(arguments);
  const auto wanted = arguments.take<std::vector<bool>>();
  const auto spends = arguments.take<bool>();
  make_rows_view("dout", dout, LayerUse::kTraining);
  const Call call(r, LayerUse::kTraining, wants_all(r, wanted), spends);
  Views all{call.inputs.query, call.inputs.key, call.inputs.value};
  all.insert(all.end(), call.weights.begin(), call.weights.end());
  if (wanted.size() != all.size()) {
    throw std::runtime_error("fovea: layer_backward: wanted has " + std::to_string(wanted.size()) +
                             " elements, must have " + std::to_string(all.size()) +
                             ": query, key, value, and every weight");
  }
  std::vector<Tensor> gradients;
  Views views(all.size());
  for (size_t i = 0; i < all.size(); ++i) {
    const bool computed = wanted[i] && all[i].given();
    // A gradient that was not asked for is a tensor of no elements.
    const Viewed gradient =
        computed ? empty_like(all[i]) : empty({0}, call.inputs.query.dtype, call.device());
    if (computed) views[i] = gradient.view;
    gradients.push_back(*gradient.tensor);
  }
  const Scratch scratch(call.layer->workspace_bytes(Pass::kBackward), call.device());
  raise_unless_ok(call.layer->backward(call.inputs, call.weights, dout.view, views,
                                       scratch.workspace(), saved_in(saved),
                                       current_stream(call.device())));
  give_back(stack, gradients);
}

void layer_cached(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  LayerRequest r = take_layer(arguments);
  std::vector<Viewed> kept = take_list(arguments);
  const auto length = arguments.take<int64_t>();
  const Call call(r, LayerUse::kCached);
  for (const Viewed& one : kept) refuse_copy_of_cache(*one.tensor);
  LayerCache cache = call.layer->cache_over(views_of("cache", kept), length);
  const Viewed out = run_forward(call, &cache, {});
  give_back(stack, *out.tensor);
}

void layer_saved_bytes(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const auto options = arguments.take<std::string>();
  const auto device = arguments.take<int64_t>();
  LayerShape shape;
  shape.batch = arguments.take<int64_t>();
  shape.q_len = arguments.take<int64_t>();
  shape.kv_len = arguments.take<int64_t>();
  shape.use = LayerUse::kTraining;
  shape.lends = true;  // as most calls will be
  const Device on = device < 0 ? Device::cpu() : Device::cuda(static_cast<int>(device));
  give_back(stack, static_cast<int64_t>(find_layer(options, shape, on)->saved_bytes()));
}

}  // namespace fovea::torch_ops
