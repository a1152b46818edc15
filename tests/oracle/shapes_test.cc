// Every engine against the oracle over shapes: around tiles and primes, head dimensions, head
// groups, zero lengths. Features ride along so that pairs are covered, not the full product.
#include "support/engines.h"

namespace fovea::test {
namespace {

class Shapes : public EngineTest {};

constexpr const char* kDTypes[] = {"f32", "bf16", "f16"};

std::string words(std::initializer_list<std::string> parts) {
  std::string text;
  for (const std::string& part : parts) text += part + " ";
  return text;
}

TEST_F(Shapes, LengthsAroundTilesAndPrimes) {
  const std::pair<int, int> lengths[] = {{1, 1},     {1, 128}, {64, 128},    {127, 127},
                                         {128, 129}, {239, 1}, {799, 3},     {113, 203},
                                         {640, 128}, {3, 799}, {1023, 1024}, {1, 2049}};
  const char* masks[] = {"", "mask=causal", "mask=window:63:0", "mask=window:17:30 prefix=5"};
  size_t turn = 0;
  for (const auto& [q, kv] : lengths) {
    for (const char* dtype : kDTypes) {
      const std::string mask = masks[turn++ % 4];
      const std::string heads = q * kv > 300000 ? "hq=1 d=64" : "b=2 hq=2 hkv=1 d=64";
      expect_accurate(every_engine(),
                      words({heads, "q=" + std::to_string(q), "kv=" + std::to_string(kv),
                             std::string("dtype=") + dtype, mask, "pass=fwd,bwd"}));
    }
  }
}

// One long case: more blocks than any tile table has special cases for, checked on a sample.
TEST_F(Shapes, LongLengths) {
  const std::vector<Engine> engines = fast_engines();  // the reference would take minutes
  if (engines.empty()) GTEST_SKIP() << "no engine but the reference";
  for (const char* dtype : kDTypes) {
    expect_accurate(engines,
                    words({"q=4097 d=64 mask=causal pass=fwd,bwd", std::string("dtype=") + dtype}));
  }
}

TEST_F(Shapes, HeadDimensions) {
  const char* dims[] = {"d=16",  "d=24",  "d=32",       "d=40",         "d=56",
                        "d=64",  "d=72",  "d=80",       "d=96",         "d=128",
                        "d=160", "d=192", "d=256",      "d=192 dv=128", "d=8",
                        "d=1",   "d=7",   "d=33 dv=65", "d=64 dv=16",   "d=16 dv=256"};
  const char* masks[] = {"", "mask=causal", "mask=window:20:10"};
  size_t turn = 0;
  for (const char* dim : dims) {
    for (const char* dtype : kDTypes) {
      expect_accurate(every_engine(), words({"hq=2 hkv=1 q=67 kv=85", dim, masks[turn++ % 3],
                                             std::string("dtype=") + dtype, "pass=fwd,bwd"}));
    }
  }
}

TEST_F(Shapes, HeadGroups) {
  const char* heads[] = {"hq=1 hkv=1", "hq=4 hkv=2", "hq=8 hkv=2", "hq=8 hkv=1", "hq=6 hkv=2"};
  for (const char* head : heads) {
    for (const char* dtype : kDTypes) {
      for (const char* lengths : {"q=70 kv=130", "q=1 kv=300"}) {
        expect_accurate(every_engine(), words({"b=2 d=64 mask=causal pass=fwd,bwd", head, lengths,
                                               std::string("dtype=") + dtype}));
      }
    }
  }
}

TEST_F(Shapes, ZeroLengths) {
  for (const char* dtype : kDTypes) {
    for (const char* sizes : {"b=0 q=5 kv=5", "b=2 q=0 kv=5", "b=2 q=5 kv=0", "b=2 q=0 kv=0",
                              "b=3 q=5 kv=7 varlen q_lens=0,5,3 kv_lens=0,7,7",
                              "b=3 q=5 kv=7 varlen q_lens=5,0,3 kv_lens=7,0,2",
                              "b=3 q=5 kv=7 varlen q_lens=3,5,0 kv_lens=7,3,0",
                              "b=3 q=5 kv=7 varlen q_lens=3,5,2 kv_lens=0,3,7",
                              "b=3 q=5 kv=7 varlen q_lens=0,5,0 kv_lens=4,0,7",
                              "b=3 q=5 kv=7 keylens=0,7,3", "b=2 q=5 kv=7 keylens=0,0"}) {
      for (const char* extra : {"", "sink dlse", "mask=causal bias=b dbias"}) {
        expect_accurate(every_engine(), words({"hq=2 d=16 pass=fwd,bwd", sizes, extra,
                                               std::string("dtype=") + dtype}));
      }
    }
  }
}

}  // namespace
}  // namespace fovea::test
