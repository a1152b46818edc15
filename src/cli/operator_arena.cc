// Contenders of one case of the operator, and their accuracy.
#include "cli/arena.h"
#include "cli/cost.h"
#include "cli/cuda/contender.h"
#include "cli/operator_peer.h"
#include "harness/comparison.h"

namespace fovea::cli {
namespace {

using harness::Accuracy;

class OperatorArena : public Arena {
 public:
  OperatorArena(const BenchCase& what, BenchSetup& setup)
      : what_(what),
        case_(std::get<harness::Case>(what.one_case)),
        setup_(setup),
        tensors_(case_),
        comparison_(case_, tensors_, setup.check_cost),
        pairs_(visible_pairs(case_.problem, tensors_.forward())) {}

  const AttentionProblem& problem() const override { return case_.problem; }

  Work work(BenchPass pass) const override {
    const bool forward = pass == BenchPass::kForward;
    return {flops(case_.problem, pairs_, operator_pass(pass)),
            forward ? minimal_bytes(tensors_.forward()) : minimal_bytes(tensors_.backward())};
  }

  Status admit(std::vector<Skipped>& skipped) override {
    const Result<Plan> plan = make_plan(
        case_.problem, setup_.device.device,
        {.backend = setup_.backend, .threads = setup_.threads, .softmax = setup_.device.softmax});
    if (!plan.ok()) return plan.status();
    if (Status done = admit_subject(*plan); !done.ok()) return done;
    if (setup_.reference_peer && plan->backend() != "reference") admit_reference(skipped);
    if (setup_.torch != nullptr) {
      const Status loaded = load_operator(*setup_.torch, case_, tensors_, inputs_for_peers());
      admit_torch(loaded, setup_.torch_engines.of_operator, what_, setup_, skipped);
    }
    // The backward pass starts from fovea's forward, whether or not that is measured too.
    return contenders().front()->produce(BenchPass::kForward);
  }

  Result<Verdict> check(Contender& contender, BenchPass pass) override {
    const bool forward = pass == BenchPass::kForward;
    if (forward) {
      tensors_.poison_outputs();
    } else {
      tensors_.poison_gradients();
    }
    if (Status done = contender.produce(pass); !done.ok()) return done;
    std::vector<Accuracy> outputs = forward ? comparison_.forward() : comparison_.backward();
    if (!contender.gives_lse()) {
      std::erase_if(outputs, [](const Accuracy& a) { return a.tensor == "lse"; });
    }
    return verdict_of(outputs);
  }

  // The checks may have left a peer's results, and NaN for lse: backward is timed on fovea's own.
  Status prepare() override { return contenders().front()->produce(BenchPass::kForward); }

 private:
  Status admit_subject(const Plan& plan) {
    if (!on_gpu(setup_)) {
      add(std::make_unique<FoveaContender>(plan, tensors_, case_.backward));
      return {};
    }
    Result<std::unique_ptr<Contender>> there =
        open_cuda_contender(plan, tensors_, setup_.device.device, case_.backward);
    if (!there.ok()) return there.status();
    add(std::move(*there));
    return {};
  }

  void admit_reference(std::vector<Skipped>& skipped) {
    const Result<Plan> reference = make_plan(case_.problem, Device::cpu(),
                                             {.backend = "reference", .threads = setup_.threads});
    if (reference.ok()) {
      add(std::make_unique<FoveaContender>(*reference, tensors_, case_.backward));
    } else {
      skipped.push_back({"fovea-reference", reference.status().message(), what_.text});
    }
  }

  // Only normal data can be drawn elsewhere.
  TorchPeer::Inputs inputs_for_peers() const {
    const bool drawable = case_.data == harness::DataFamily::kNormal;
    return drawable ? inputs_for(setup_, tensors_.bytes()) : TorchPeer::Inputs::kSame;
  }

  const BenchCase& what_;
  const harness::Case& case_;
  BenchSetup& setup_;
  harness::CaseTensors tensors_;
  harness::Comparison comparison_;  // the oracle is asked once for all contenders
  double pairs_;
};

}  // namespace

std::unique_ptr<Arena> make_operator_arena(const BenchCase& what, BenchSetup& setup) {
  return std::make_unique<OperatorArena>(what, setup);
}

}  // namespace fovea::cli
