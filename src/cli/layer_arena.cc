// Contenders of one layer's case, and their accuracy.
#include "cli/arena.h"
#include "cli/cost.h"
#include "cli/cuda/layer_contender.h"
#include "cli/json.h"
#include "cli/peer_case.h"
#include "harness/layer_comparison.h"
#include "harness/layer_weights.h"

namespace fovea::cli {
namespace {

using harness::LayerCase;
using harness::LayerViews;
using harness::LayerWeight;

Json describe(const LayerCase& c) {
  return {{"layer", harness::layer_name(c)},
          {"zaya", c.preset == harness::CcgqaPreset::kZaya},
          {"hq", c.head_q},
          {"hkv", c.head_kv},
          {"d", c.head_dim},
          {"rope", c.position == Position::kRope},
          {"tf32", false},
          {"seed", c.seed}};
}

PeerCase peer_case_of(const LayerCase& c, const LayerViews& views) {
  PeerCase peer_case;
  peer_case.description = describe(c);
  peer_case.inputs = {{{"x", views.x}, "normal"},
                      {{"dout", views.dout}, "normal"},
                      {{"sampled_dout", views.sampled_dout}, "normal"}};
  const std::vector<harness::WeightShape> shapes = weight_shapes(c);
  for (size_t i = 0; i < shapes.size(); ++i) {
    const bool drawn = !shapes[i].constant;
    peer_case.inputs.push_back({{"w." + shapes[i].name, views.weights[i].view},
                                drawn ? "normal" : "",
                                shapes[i].deviation});
  }
  peer_case.outputs = [views](BenchPass pass) {
    std::vector<PeerTensor> outputs = {{"out", views.out}};
    if (pass == BenchPass::kForward) return outputs;
    outputs.push_back({"dx", views.dx});
    for (const LayerWeight& w : views.weights) outputs.push_back({"dw." + w.name, w.gradient});
    return outputs;
  };
  return peer_case;
}

class LayerArena : public Arena {
 public:
  LayerArena(const BenchCase& what, BenchSetup& setup)
      : what_(what),
        case_(std::get<LayerCase>(what.one_case)),
        setup_(setup),
        sample_(setup.check ? harness::sample_tokens(case_, affordable(setup)) : 0) {}

  const AttentionProblem& problem() const override { return problem_; }

  Work work(BenchPass pass) const override {
    const double tokens = static_cast<double>(case_.batch * case_.q_len);
    const double pairs = visible_pairs(problem_, {});
    const double forward = flops(problem_, pairs, Pass::kForward);
    const double projections = 2 * tokens * weight_macs(case_);
    double bytes = 0;
    LayerViews views = tensors_->views();
    if (pass == BenchPass::kForward) views = without_gradients(views);
    views.sampled_dout = {};
    views.for_each([&](const TensorView& t) {
      if (t.given()) bytes += static_cast<double>(t.elements() * dtype_bytes(t.dtype));
    });
    if (pass == BenchPass::kForward) return {projections + forward, bytes};
    return {3 * projections + forward + flops(problem_, pairs, Pass::kBackward), bytes};
  }

  Status admit(std::vector<Skipped>& skipped) override {
    Result<PlannedLayer> layer = PlannedLayer::make(
        case_, setup_.device.device,
        {.backend = setup_.backend, .threads = setup_.threads, .softmax = setup_.device.softmax});
    if (!layer.ok()) return layer.status();
    problem_ = layer->attention().problem();
    tensors_ = std::make_unique<harness::LayerTensors>(case_, sample_);
    if (sample_ > 0) comparison_.emplace(case_, *tensors_, sample_);
    if (Status done = admit_subject(std::move(*layer)); !done.ok()) return done;
    if (setup_.torch != nullptr) {
      const TorchPeer::Inputs inputs =
          sample_ > 0 ? inputs_for(setup_, tensors_->bytes()) : TorchPeer::Inputs::kOwn;
      const Status loaded = setup_.torch->load(peer_case_of(case_, tensors_->views()), inputs);
      admit_torch(loaded, setup_.torch_engines.of(case_), what_, setup_, skipped);
    }
    return {};
  }

  Result<Verdict> check(Contender& contender, BenchPass pass) override {
    if (!comparison_) return Verdict{};
    tensors_->poison_outputs();
    if (Status done = contender.produce(pass); !done.ok()) return done;
    return verdict_of(pass == BenchPass::kForward ? comparison_->forward()
                                                  : comparison_->training());
  }

  Status prepare() override { return {}; }  // every pass begins with its own forward

 private:
  // Of every thread: all of a layer's weights take part, where the operator's rows can be sampled.
  static double affordable(const BenchSetup& setup) { return setup.check_cost * setup.threads; }

  static LayerViews without_gradients(LayerViews views) {
    views.dout = views.dx = {};
    for (LayerWeight& weight : views.weights) weight.gradient = {};
    return views;
  }

  Status admit_subject(PlannedLayer layer) {
    if (!on_gpu(setup_)) {
      add(std::make_unique<LayerContender>(std::move(layer), *tensors_));
      return {};
    }
    Result<std::unique_ptr<Contender>> there =
        open_cuda_layer(layer, *tensors_, setup_.device.device);
    if (!there.ok()) return there.status();
    add(std::move(*there));
    return {};
  }

  const BenchCase& what_;
  const LayerCase& case_;
  BenchSetup& setup_;
  int64_t sample_;  // tokens that are checked; 0: none
  AttentionProblem problem_;
  std::unique_ptr<harness::LayerTensors> tensors_;
  std::optional<harness::LayerComparison> comparison_;
};

}  // namespace

std::unique_ptr<Arena> make_layer_arena(const BenchCase& what, BenchSetup& setup) {
  return std::make_unique<LayerArena>(what, setup);
}

}  // namespace fovea::cli
