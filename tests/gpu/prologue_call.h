// One call of CCGQA's prologue, forward and backward, that a test runs on the host and on the GPU.
#pragma once

#include <cmath>
#include <deque>
#include <ostream>
#include <vector>

#include "layers/ccgqa_prologue.h"

namespace fovea::test {

struct PrologueSpec {
  const char* name = "";
  int64_t heads = 4, heads_kv = 2, dim = 16, batch = 2, q_len = 37;
  CcgqaConv conv = CcgqaConv::kHeadsThenAll;
  int64_t taps[2] = {3, 3};
  bool convs = true, bias = false, couple = true, norm = true, shift = true, rope = true;
  CcgqaCoupling coupling = CcgqaCoupling::kAllHeads;
  KeyTemperature temperature = KeyTemperature::kShared;
  RopeStyle style = RopeStyle::kInterleaved;
  double fraction = 1;
  int64_t first = 0;
  bool ids = false;
  bool again = false;  // u is not there for backward
  bool odd = false;    // weights and their gradients begin on odd addresses
};

inline void PrintTo(const PrologueSpec& s, std::ostream* out) { *out << s.name; }

enum class TensorRole { kInput, kOutput, kOwn };  // kOwn: each engine has its own form of it

struct PrologueCall {
  layers::Prologue p;
  layers::PrologueGradients g;

  template <typename Use>
  void visit(const Use& use) {
    use("z", p.z, TensorRole::kInput, 1.0);
    use("dqk", g.dqk, TensorRole::kInput, 1.0);
    use("dv", g.dv, TensorRole::kInput, 1.0);
    use("temperature", p.mix.temperature, TensorRole::kInput, 0.5);
    for (layers::Conv* conv : {&p.first, &p.second}) {
      for (auto& block : conv->block) {
        const double fan_in = static_cast<double>(conv->taps * block.group);
        use("weight", block.weight, TensorRole::kInput, 1 / std::sqrt(fan_in));
        use("bias", block.bias, TensorRole::kInput, 0.3);
      }
    }
    use("u", p.u, TensorRole::kOutput, 0.0);
    use("mixed", p.mixed, TensorRole::kOwn, 0.0);
    use("qk", p.qk, TensorRole::kOutput, 0.0);
    use("v", p.v, TensorRole::kOutput, 0.0);
    use("dmixed", g.dmixed, TensorRole::kOutput, 0.0);
    use("du", g.du, TensorRole::kOutput, 0.0);
    use("dz", g.dz, TensorRole::kOutput, 0.0);
    use("dtemperature", g.dtemperature, TensorRole::kOutput, 0.0);
    const char* names[2][2] = {{"dfirst", "dfirst bias"}, {"dsecond", "dsecond bias"}};
    for (int n = 0; n < 2; ++n) {
      for (auto& block : (n == 0 ? g.first : g.second).block) {
        use(names[n][0], block.weight, TensorRole::kOutput, 0.0);
        use(names[n][1], block.bias, TensorRole::kOutput, 0.0);
      }
    }
  }
};

// A call with memory on the host. Inputs are `like`'s, or random and of this type's precision.
class HostPrologue {
 public:
  HostPrologue(const PrologueSpec& s, DType dtype, HostPrologue* like);
  HostPrologue(const HostPrologue&) = delete;
  PrologueCall call;

 private:
  std::deque<std::vector<unsigned char>> memory_;
};

// By plain sums; in float64 that is the reference.
void run_on_host(const PrologueSpec& s, DType dtype, PrologueCall& call);

// Runs on the GPU with the inputs of `call`, and leaves the outputs in its memory.
void run_on_device(const PrologueSpec& s, PrologueCall& call);

}  // namespace fovea::test
