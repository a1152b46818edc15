// Options by kind of layer, and weights by name.
#include "harness/any_layer.h"

namespace fovea::harness {
namespace {

template <typename Weights>
struct Member {
  const char* name;
  TensorView Weights::*view;
};

constexpr Member<MultiHeadWeights> kMultiHeadMembers[] = {{"q", &MultiHeadWeights::q},
                                                          {"k", &MultiHeadWeights::k},
                                                          {"v", &MultiHeadWeights::v},
                                                          {"out", &MultiHeadWeights::out}};
constexpr Member<FusedWeights> kFusedMembers[] = {{"qkv", &FusedWeights::qkv},
                                                  {"out", &FusedWeights::out}};
constexpr Member<LatentWeights> kLatentMembers[] = {
    {"q_down", &LatentWeights::q_down},   {"q_up", &LatentWeights::q_up},
    {"kv_down", &LatentWeights::kv_down}, {"k_up", &LatentWeights::k_up},
    {"v_up", &LatentWeights::v_up},       {"out", &LatentWeights::out}};
constexpr Member<CcgqaWeights> kCcgqaMembers[] = {
    {"qkv", &CcgqaWeights::qkv},
    {"out", &CcgqaWeights::out},
    {"q_conv1", &CcgqaWeights::q_conv1},
    {"q_conv2", &CcgqaWeights::q_conv2},
    {"k_conv1", &CcgqaWeights::k_conv1},
    {"k_conv2", &CcgqaWeights::k_conv2},
    {"channel_conv", &CcgqaWeights::channel_conv},
    {"head_conv", &CcgqaWeights::head_conv},
    {"channel_conv_bias", &CcgqaWeights::channel_conv_bias},
    {"head_conv_bias", &CcgqaWeights::head_conv_bias},
    {"temperature", &CcgqaWeights::temperature}};

constexpr const auto& members_of(const MultiHeadWeights*) { return kMultiHeadMembers; }
constexpr const auto& members_of(const FusedWeights*) { return kFusedMembers; }
constexpr const auto& members_of(const LatentWeights*) { return kLatentMembers; }
constexpr const auto& members_of(const CcgqaWeights*) { return kCcgqaMembers; }

template <typename Weights>
Weights named(const LayerViews& views, TensorView LayerWeight::*which) {
  Weights weights;
  for (const LayerWeight& weight : views.weights) {
    for (const auto& member : members_of(static_cast<const Weights*>(nullptr))) {
      if (weight.name == member.name) weights.*(member.view) = weight.*which;
    }
  }
  return weights;
}

template <typename Weights>
class LayerOf : public AnyLayer {
 public:
  explicit LayerOf(LayerPlan<Weights> plan) : plan_(std::move(plan)) {}

  const Plan& attention() const override { return plan_.attention(); }
  size_t workspace_bytes(Pass pass) const override { return plan_.workspace_bytes(pass); }
  size_t saved_bytes() const override { return plan_.saved_bytes(); }

  Status forward(const LayerViews& views, Workspace workspace, Saved saved,
                 Stream stream) const override {
    LayerForward<Weights> call;
    call.query = views.x;
    call.weights = named<Weights>(views, &LayerWeight::view);
    call.out = views.out;
    return plan_.forward(call, workspace, saved, stream);
  }

  Status backward(const LayerViews& views, Workspace workspace, Saved saved,
                  Stream stream) const override {
    LayerBackward<Weights> call;
    call.query = views.x;
    call.weights = named<Weights>(views, &LayerWeight::view);
    call.dout = views.dout;
    call.dquery = views.dx;
    call.dweights = named<Weights>(views, &LayerWeight::gradient);
    return plan_.backward(call, workspace, saved, stream);
  }

 private:
  LayerPlan<Weights> plan_;
};

struct Maker {
  LayerShape shape;
  Device device;
  const PlanOptions& plan;

  template <typename Options>
  Result<std::unique_ptr<AnyLayer>> make(const Options& options) const {
    auto made = make_layer(options, shape, device, plan);
    if (!made.ok()) return made.status();
    return wrap(std::move(*made));
  }

  template <typename Weights>
  static std::unique_ptr<AnyLayer> wrap(LayerPlan<Weights> plan) {
    return std::make_unique<LayerOf<Weights>>(std::move(plan));
  }
};

template <typename Options>
Options classic(const LayerCase& c) {
  Options options;
  options.embed_dim = c.embed_dim;
  options.num_heads = c.head_q;
  options.head_dim = c.head_dim;
  options.dtype = c.dtype;
  options.causal = true;
  options.position = c.position;
  if constexpr (requires { options.bias; }) options.bias = false;
  return options;
}

CcgqaOptions ccgqa(const LayerCase& c) {
  CcgqaOptions options = c.preset == CcgqaPreset::kHydra
                             ? CcgqaOptions::hydra(c.embed_dim, c.head_q, c.head_kv)
                             : CcgqaOptions::zaya(c.embed_dim, c.head_q, c.head_kv, c.head_dim);
  options.head_dim = c.head_dim;
  options.dtype = c.dtype;
  return options;
}

}  // namespace

Result<std::unique_ptr<AnyLayer>> make_any_layer(const LayerCase& c, LayerUse use, Device device,
                                                 const PlanOptions& plan) {
  const Maker maker{{.batch = c.batch, .q_len = c.q_len, .use = use, .lends = true, .spends = true},
                    device,
                    plan};
  switch (c.kind) {
    case LayerKind::kMultiHead: return maker.make(classic<MultiHeadOptions>(c));
    case LayerKind::kSelf: return maker.make(classic<SelfAttentionOptions>(c));
    case LayerKind::kMultiQuery: return maker.make(classic<MultiQueryOptions>(c));
    case LayerKind::kLatent: return maker.make(classic<LatentOptions>(c));
    case LayerKind::kCcgqa: return maker.make(ccgqa(c));
    case LayerKind::kGrouped: break;
  }
  auto grouped = classic<GroupedQueryOptions>(c);
  grouped.num_kv_heads = c.head_kv;
  return maker.make(grouped);
}

}  // namespace fovea::harness
