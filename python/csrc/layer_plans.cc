#include "layer_plans.h"

#include <list>
#include <mutex>
#include <stdexcept>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "layer_settings.h"
#include "torch_tensor.h"

namespace fovea::torch_ops {
namespace {

using Slots = std::vector<TensorView*>;

void add(Slots& slots, std::initializer_list<TensorView*> more) { slots.insert(slots.end(), more); }

void add_norm(Slots& slots, QkNorm norm, QkNormWeights& w) {
  if (norm == QkNorm::kRms) add(slots, {&w.q, &w.k});
  if (norm == QkNorm::kLayer) add(slots, {&w.q, &w.q_bias, &w.k, &w.k_bias});
}

Slots slots_of(const MultiHeadOptions& o, MultiHeadWeights& w) {
  Slots slots{&w.q, &w.k, &w.v, &w.out};
  if (o.bias) add(slots, {&w.q_bias, &w.k_bias, &w.v_bias, &w.out_bias});
  add_norm(slots, o.qk_norm, w.norm);
  return slots;
}

Slots slots_of(const GroupedQueryOptions& o, FusedWeights& w) {
  Slots slots{&w.qkv, &w.out};
  if (o.bias) add(slots, {&w.qkv_bias, &w.out_bias});
  add_norm(slots, o.qk_norm, w.norm);
  return slots;
}

Slots slots_of(const LatentOptions& o, LatentWeights& w) {
  Slots slots{&w.q_down, &w.q_up, &w.kv_down, &w.k_up, &w.v_up, &w.out};
  if (o.form == LatentForm::kDeepSeek) add(slots, {&w.q_latent_norm, &w.kv_latent_norm});
  add_norm(slots, o.qk_norm, w.norm);
  return slots;
}

Slots slots_of(const CcgqaOptions& o, CcgqaWeights& w) {
  Slots slots{&w.qkv, &w.out};
  if (o.convs && o.conv == CcgqaConv::kHeadsThenAll) {
    add(slots, {&w.q_conv1, &w.q_conv2, &w.k_conv1, &w.k_conv2});
  } else if (o.convs) {
    add(slots, {&w.channel_conv, &w.head_conv});
    if (o.conv_bias) add(slots, {&w.channel_conv_bias, &w.head_conv_bias});
  }
  if (o.qk_norm) add(slots, {&w.temperature});
  return slots;
}

void fill(const Slots& slots, const TensorView* views, size_t count, const char* what) {
  if (count != slots.size()) {
    throw std::runtime_error("fovea: layer: there are " + std::to_string(count) + " " + what +
                             ", must be " + std::to_string(slots.size()));
  }
  for (size_t i = 0; i < count; ++i) *slots[i] = views[i];
}

template <typename Options, typename Weights>
class Bound final : public BoundLayer {
 public:
  Bound(const Options& options, LayerPlan<Weights> plan)
      : options_(options), plan_(std::move(plan)) {}

  double dropout() const override {
    if constexpr (std::is_base_of_v<LayerOptions, Options>) return options_.dropout;
    return 0;
  }
  size_t workspace_bytes(Pass pass) const override { return plan_.workspace_bytes(pass); }
  size_t saved_bytes() const override { return plan_.saved_bytes(); }

  LayerCache cache_over(const Views& tensors, int64_t length) const override {
    LayerCache cache = plan_.cache_in(nullptr);
    Slots slots;
    for (TensorView* kept : {&cache.k, &cache.v, &cache.conv, &cache.shift}) {
      if (kept->given()) slots.push_back(kept);
    }
    fill(slots, tensors.data(), tensors.size(), "tensors of a cache");
    cache.length = length;
    return cache;
  }

  Status forward(const LayerInputs& inputs, const Views& weights, const TensorView& out,
                 LayerCache* cache, Workspace workspace, Saved saved,
                 Stream stream) const override {
    LayerForward<Weights> call;
    static_cast<LayerInputs&>(call) = inputs;
    fill(slots_of(options_, call.weights), weights.data(), weights.size(), "weights");
    call.out = out;
    call.cache = cache;
    return plan_.forward(call, workspace, saved, stream);
  }

  Status backward(const LayerInputs& inputs, const Views& weights, const TensorView& dout,
                  const Views& gradients, Workspace workspace, Saved saved,
                  Stream stream) const override {
    LayerBackward<Weights> call;
    static_cast<LayerInputs&>(call) = inputs;
    fill(slots_of(options_, call.weights), weights.data(), weights.size(), "weights");
    call.dout = dout;
    call.dquery = gradients[0], call.dkey = gradients[1], call.dvalue = gradients[2];
    fill(slots_of(options_, call.dweights), gradients.data() + 3, gradients.size() - 3,
         "gradients of weights");
    return plan_.backward(call, workspace, saved, stream);
  }

 private:
  Options options_;
  LayerPlan<Weights> plan_;
};

template <typename Options, typename Weights>
std::shared_ptr<const BoundLayer> bind(const Options& options, Result<LayerPlan<Weights>> plan) {
  raise_unless_ok(plan.status());
  return std::make_shared<Bound<Options, Weights>>(options, *std::move(plan));
}

// The plans that were used last. A plan holds tables of its positions, so not all are kept.
class PlanCache {
 public:
  using Plan = std::shared_ptr<const BoundLayer>;

  Plan find(const std::string& key) {
    const std::lock_guard lock(mutex_);
    const auto found = by_key_.find(key);
    if (found == by_key_.end()) return nullptr;
    used_.splice(used_.begin(), used_, found->second);
    return found->second->second;
  }

  void keep(const std::string& key, const Plan& plan) {
    const std::lock_guard lock(mutex_);
    if (by_key_.count(key) != 0) return;  // another thread was faster
    used_.emplace_front(key, plan);
    by_key_[key] = used_.begin();
    if (used_.size() <= kMost) return;
    by_key_.erase(used_.back().first);
    used_.pop_back();
  }

 private:
  static constexpr size_t kMost = 128;
  std::mutex mutex_;
  std::list<std::pair<std::string, Plan>> used_;  // the newest first
  std::unordered_map<std::string, decltype(used_)::iterator> by_key_;
};

std::string key_of(const std::string& options, const LayerShape& shape, Device device,
                   int threads) {
  std::string key = options;
  for (const int64_t number :
       {shape.batch, shape.q_len, shape.kv_len, static_cast<int64_t>(shape.use),
        int64_t{shape.masked}, int64_t{shape.lends}, int64_t{shape.spends},
        static_cast<int64_t>(device.type), int64_t{device.index}, int64_t{threads}}) {
    key += ' ';
    key += std::to_string(number);
  }
  return key;
}

}  // namespace

std::shared_ptr<const BoundLayer> find_layer(const std::string& options, const LayerShape& shape,
                                             Device device) {
  static PlanCache cache;
  PlanOptions plan;
  plan.threads = thread_count();
  const std::string key = key_of(options, shape, device, plan.threads);
  if (auto found = cache.find(key)) return found;
  LayerSettings layer = parse_layer(options);
  plan.backend = std::move(layer.backend);
  std::shared_ptr<const BoundLayer> made = std::visit(
      [&](const auto& o) { return bind(o, make_layer(o, shape, device, plan)); }, layer.options);
  cache.keep(key, made);
  return made;
}

}  // namespace fovea::torch_ops
