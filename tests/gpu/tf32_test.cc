// f32 problems whose caller allows tf32, on a GPU: that tensor cores get them, every feature and
// head dims of all kinds against the oracle, and random problems.
#include "support/engines.h"
#include "support/random_case.h"

namespace fovea::test::tf32 {
namespace {

constexpr double kCost = 1e8;  // multiply-adds for the oracle, per case

// With one SM, small problems take the cuts of large ones.
const std::vector<Engine> kEngines = {{"portable", "", Device::cuda(0), ""},
                                      {"portable", "", Device::cuda(0), "1"}};

class OnTf32 : public EngineTest {
 protected:
  static void expect(const harness::Case& c) {
    EXPECT_EQ(plan_on(kEngines[0], c.problem).kernel().rfind("portable/tf32/", 0), 0u)
        << harness::format_case(c);
    expect_accurate(kEngines, c, kCost);
  }
  static void expect(const std::string& text) {
    expect(must_parse(text + " pass=fwd,bwd dtype=f32 tf32"));
  }
};

TEST_F(OnTf32, TilesAndTails) {
  size_t turn = 0;
  for (const char* dims : {"d=8", "d=40", "d=64", "d=33 dv=65", "d=72", "d=128", "d=24 dv=128",
                           "d=192 dv=128", "d=256", "d=200 dv=248"}) {
    for (const char* lengths : {"q=1 kv=1", "q=63 kv=65", "q=64 kv=64", "q=129 kv=127",
                                "q=300 kv=700", "q=700 kv=300", "q=1 kv=3000", "q=239 kv=1"}) {
      const char* masks[] = {"mask=none", "mask=causal", "mask=window:70:9"};
      expect("b=2 hq=4 hkv=2 " + std::string(lengths) + " " + dims + " " + masks[turn++ % 3]);
      if (HasFatalFailure()) return;
    }
    ++turn;
  }
}

TEST_F(OnTf32, Features) {
  for (const char* feature : {"mask=causal prefix=33",
                              "mask=window:25:25 prefix=40",
                              "bias=full dbias",
                              "bias=b dbias",
                              "bias=bhq dbias mask=causal",
                              "boolmask=full",
                              "boolmask=bh mask=causal",
                              "keylens",
                              "keylens mask=window:20:5 alibi",
                              "varlen mask=causal",
                              "varlen alibi dropout=0.2 dlse",
                              "varlen bias=full dbias boolmask=h",
                              "alibi=batch mask=causal",
                              "softcap=2",
                              "softcap=30 mask=causal bias=h dbias",
                              "sink dlse mask=causal",
                              "dropout=0.1",
                              "dropout=0.5 mask=causal sink dlse",
                              "scale=-0.3 mask=causal",
                              "scale=0",
                              "deterministic mask=causal bias=bhq dbias",
                              "order=bshd pad=3 keylens",
                              "order=bshd pad=8 varlen mask=causal",
                              "bias=h dbias boolmask=b alibi softcap=8 sink dropout=0.15 dlse "
                              "mask=window:70:3 keylens"}) {
    for (const char* shape : {"b=2 hq=4 hkv=2 q=75 kv=201 d=64", "b=3 hq=2 q=130 kv=67 d=128 dv=96",
                              "b=2 hq=4 hkv=1 q=3 kv=260 d=160"}) {
      expect(std::string(shape) + " " + feature);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(OnTf32, DataFamilies) {
  for (const char* family :
       {"normal", "spiky", "large_logits", "constant", "tiny", "outlier_channels"}) {
    for (const char* shape :
         {"hq=2 q=150 kv=333 d=64 mask=causal", "hq=4 hkv=2 q=65 kv=65 d=128",
          "hq=1 q=1 kv=1000 d=32", "hq=2 q=40 kv=90 d=64 sink softcap=20 dlse"}) {
      expect(std::string(shape) + " data=" + family);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(OnTf32, RandomProblems) {
  constexpr uint64_t kProblems = 300;  // of which a third are f32
  for (uint64_t seed = 1; seed <= kProblems; ++seed) {
    harness::Case c = random_case(seed);
    if (c.problem.dtype != DType::kF32) continue;
    c.problem.tf32 = Tf32::kAllowed;
    expect(c);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace fovea::test::tf32
