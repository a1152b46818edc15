// What scaled_dot_product_attention can say, and how.
#include "cli/operator_peer.h"

#include "cli/json.h"
#include "cli/peer_case.h"

namespace fovea::cli {
namespace {

// What scaled_dot_product_attention has no argument for; empty where it can say the case.
std::string inexpressible(const harness::Case& c) {
  const AttentionProblem& p = c.problem;
  if (p.softcap > 0) return "softcap";
  if (has(p.features, Feature::kSink)) return "sink";
  if (has(p.features, Feature::kKeyLengths)) return "key lengths";
  if (p.layout == Layout::kPacked) return "packed layout";
  if (p.dropout > 0) return "dropout that fovea would draw alike";
  if (c.want_dlse) return "gradient of lse";
  if (c.want_dbias) return "gradient of the bias asked for here";
  return {};
}

Json describe(const harness::Case& c) {
  const AttentionProblem& p = c.problem;
  return {{"b", p.batch},
          {"hq", p.head_q},
          {"hkv", p.head_kv},
          {"q", p.q_len},
          {"kv", p.kv_len},
          {"left", p.mask.left},
          {"right", p.mask.right},
          {"prefix", p.mask.prefix},
          {"scale", p.scale ? Json(*p.scale) : Json()},
          {"alibi", has(p.features, Feature::kAlibi)},
          {"tf32", p.tf32 == Tf32::kAllowed},
          {"seed", c.seed}};
}

}  // namespace

Status load_operator(TorchPeer& torch, const harness::Case& c, harness::CaseTensors& tensors,
                     TorchPeer::Inputs inputs) {
  if (const std::string feature = inexpressible(c); !feature.empty()) {
    return {StatusCode::kUnsupported, "scaled_dot_product_attention has no " + feature};
  }
  const AttentionInputs& in = tensors.forward();
  PeerCase peer_case;
  peer_case.description = describe(c);
  peer_case.inputs = {{{"q", in.q}, "normal"},     {{"k", in.k}, "normal"},
                      {{"v", in.v}, "normal"},     {{"bias", in.bias}, "normal"},
                      {{"mask", in.mask}, "mask"}, {{"alibi_slopes", in.alibi_slopes}}};
  if (c.backward) peer_case.inputs.push_back({{"dout", tensors.backward().dout}, "normal"});
  peer_case.outputs = [&tensors](BenchPass pass) -> std::vector<PeerTensor> {
    if (pass == BenchPass::kForward) return {{"out", tensors.forward().out}};
    const BackwardTensors& t = tensors.backward();
    return {{"dq", t.dq}, {"dk", t.dk}, {"dv", t.dv}};
  };
  return torch.load(std::move(peer_case), inputs);
}

}  // namespace fovea::cli
