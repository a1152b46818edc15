// LayerPlan: the checks that all layers share, then the layer's own, then its steps.
#include "api/guard.h"
#include "base/ceil_div.h"
#include "base/refusal.h"
#include "layers/layer.h"

namespace fovea {
namespace {

using layers::CallCheck;
using layers::Memory;
using layers::Room;
using layers::Run;

int64_t cache_size(const TensorView& t) {
  constexpr int64_t kAlign = kWorkspaceAlignment;
  return t.given() ? ceil_div(t.elements() * dtype_bytes(t.dtype), kAlign) * kAlign : 0;
}

void check_cache_tensors(CallCheck& check, const LayerCache& given, const LayerCache& want) {
  struct One {
    const char* name;
    const TensorView& given;
    const TensorView& want;
  };
  for (const One& one :
       {One{"cache.k", given.k, want.k}, One{"cache.v", given.v, want.v},
        One{"cache.conv", given.conv, want.conv}, One{"cache.shift", given.shift, want.shift}}) {
    if (!one.want.given()) {
      check.absent(one.name, one.given, "this layer keeps no such thing");
      continue;
    }
    const auto& s = one.want.sizes;
    if (one.want.rank == 4) {
      check.output(one.name, one.given,
                   {{"batch", s[0]}, {"max_seq_len", s[1]}, {"head_kv", s[2]}, {"dim", s[3]}});
    } else {
      check.output(one.name, one.given, {{"batch", s[0]}, {"rows", s[1]}, {"channels", s[2]}});
    }
  }
}

}  // namespace

template <typename Weights>
const LayerShape& LayerPlan<Weights>::shape() const {
  return impl_->shape;
}

template <typename Weights>
const Plan& LayerPlan<Weights>::attention() const {
  return impl_->attend->plan();
}

template <typename Weights>
size_t LayerPlan<Weights>::workspace_bytes(Pass pass) const {
  return impl_->memory.bytes(pass == Pass::kForward ? Room::kForward : Room::kBackward);
}

template <typename Weights>
size_t LayerPlan<Weights>::saved_bytes() const {
  return impl_->memory.bytes(Room::kSaved);
}

template <typename Weights>
size_t LayerPlan<Weights>::cache_bytes() const {
  if (!impl_->cached()) return 0;
  const LayerCache views = impl_->cache_views();
  return static_cast<size_t>(cache_size(views.k) + cache_size(views.v) + cache_size(views.conv) +
                             cache_size(views.shift));
}

template <typename Weights>
LayerCache LayerPlan<Weights>::cache_in(void* memory) const {
  if (!impl_->cached()) return {};
  LayerCache cache = impl_->cache_views();
  auto* at = static_cast<std::byte*>(memory);
  for (TensorView* view : {&cache.k, &cache.v, &cache.conv, &cache.shift}) {
    if (!view->given()) continue;
    view->data = at;
    view->device = impl_->device;
    at += cache_size(*view);
  }
  return cache;
}

template <typename Weights>
Status LayerPlan<Weights>::forward(const LayerForward<Weights>& call, Workspace workspace,
                                   Saved saved, Stream stream) const {
  return guarded<Status>([&]() -> Status {
    const Impl& layer = *impl_;
    CallCheck check("forward", layer.device, layer.dtype);
    layer.check_inputs(check, call);
    check.prefix("weights.");
    layer.check_weights(check, CallCheck::Weights::kRead, call.weights);
    check.prefix("");
    check.lends(layer.shape.lends);
    check.output("out", call.out, layer.query_dims());
    check.lends(false);
    check.cache(call.cache, layer.shape, layer.max_seq_len);
    if (check.ok() && call.cache != nullptr) {
      check_cache_tensors(check, *call.cache, layer.cache_views());
    }
    check.memory(workspace, workspace_bytes(Pass::kForward));
    check.saved(saved, saved_bytes());
    if (Status s = check.finish(); !s.ok()) return s;
    Memory at{&layer.memory, {}};
    at.set(Room::kForward, workspace.data);
    at.set(Room::kSaved, saved.data);
    at.set(Room::kOut, call.out.data);
    Run run{at.scratch_at(layer.forward_scratch), stream, {}};
    layer.forward(run, at, call);
    if (run.status.ok() && call.cache != nullptr) call.cache->length += layer.shape.kv_len;
    return run.status;
  });
}

template <typename Weights>
Status LayerPlan<Weights>::backward(const LayerBackward<Weights>& call, Workspace workspace,
                                    Saved saved, Stream stream) const {
  return guarded<Status>([&]() -> Status {
    const Impl& layer = *impl_;
    if (!layer.training()) {
      return refuse("backward", "shape.use", layer.cached() ? "kCached" : "kInference",
                    must("be kTraining for a backward pass"));
    }
    CallCheck check("backward", layer.device, layer.dtype);
    layer.check_inputs(check, call);
    check.prefix("weights.");
    layer.check_weights(check, CallCheck::Weights::kRead, call.weights);
    check.prefix("");
    check.input("dout", call.dout, layer.query_dims());
    check.lends(layer.shape.lends);
    check.optional_output("dquery", call.dquery, layer.query_dims());
    layer.check_input_gradients(check, call);
    check.prefix("dweights.");
    layer.check_weights(check, CallCheck::Weights::kGradients, call.dweights);
    check.prefix("");
    check.memory(workspace, workspace_bytes(Pass::kBackward));
    check.saved(saved, saved_bytes());
    if (Status s = check.finish(); !s.ok()) return s;
    Memory at{&layer.memory, {}};
    at.set(Room::kBackward, workspace.data);
    at.set(Room::kSaved, saved.data);
    at.set(Room::kDquery, call.dquery.data);
    Run run{at.scratch_at(layer.backward_scratch), stream, {}};
    layer.backward(run, at, call);
    return run.status;
  });
}

template class LayerPlan<MultiHeadWeights>;
template class LayerPlan<FusedWeights>;
template class LayerPlan<LatentWeights>;
template class LayerPlan<CcgqaWeights>;

}  // namespace fovea
