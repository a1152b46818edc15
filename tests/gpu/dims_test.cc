// Head dimensions against lengths on a GPU, held to the oracle: every pair in every dtype, masks
// and head groups in turn. FOVEA_GPU_FULL=1 takes every mask with every pair instead.
#include <cctype>
#include <cstdlib>

#include "support/engines.h"

namespace fovea::test {
namespace {

// Multiply-adds for the oracle, per case: these cases are many, and a sample of each will do.
constexpr double kCost = 1e8;

constexpr const char* kDTypes[] = {"bf16", "f16", "f32"};
constexpr const char* kMasks[] = {"mask=none", "mask=causal", "mask=window:50:10",
                                  "mask=causal prefix=70"};
constexpr const char* kHeads[] = {"hq=2 hkv=2", "b=2 hq=4 hkv=2", "hq=8 hkv=2", "hq=8 hkv=1",
                                  "b=2 hq=3 hkv=1"};
constexpr const char* kLengths[] = {"q=1 kv=1",     "q=1 kv=128",  "q=64 kv=128", "q=127 kv=127",
                                    "q=128 kv=129", "q=239 kv=1",  "q=799 kv=3",  "q=113 kv=203",
                                    "q=640 kv=128", "q=1 kv=1000", "q=5 kv=700",  "q=1023 kv=1024"};

bool full() {
  const char* wish = std::getenv("FOVEA_GPU_FULL");
  return wish != nullptr && std::string(wish) == "1";
}

class Dims : public EngineTest, public testing::WithParamInterface<const char*> {
 protected:
  void expect(const std::string& rest) {
    expect_accurate(fast_engines(), std::string(GetParam()) + " pass=fwd,bwd " + rest, kCost);
  }
};

TEST_P(Dims, WithEveryLength) {
  size_t turn = std::string(GetParam()).size() * 3;  // so that dims meet other masks and heads
  for (const char* lengths : kLengths) {
    for (const char* dtype : kDTypes) {
      ++turn;
      for (size_t m = 0; m < std::size(kMasks); ++m) {
        if (!full() && m != turn % std::size(kMasks)) continue;
        expect(std::string(lengths) + " " + kHeads[turn % std::size(kHeads)] + " " + kMasks[m] +
               " dtype=" + dtype + " seed=" + std::to_string(turn));
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(Dims, WithEveryMaskAndGroup) {
  size_t turn = 0;
  for (const char* heads : kHeads) {
    for (const char* mask : kMasks) {
      const std::string dtype = kDTypes[turn++ % 3];
      expect("q=150 kv=220 " + std::string(heads) + " " + mask + " dtype=" + dtype);
      if (HasFatalFailure()) return;
    }
  }
}

std::string dims_name(const testing::TestParamInfo<const char*>& info) {
  std::string name;
  for (const char* at = info.param; *at != '\0'; ++at) {
    if (std::isalnum(static_cast<unsigned char>(*at)) != 0) name += *at;
    if (*at == ' ') name += '_';
  }
  return name;
}

INSTANTIATE_TEST_SUITE_P(HeadDims, Dims,
                         testing::Values("d=16", "d=24", "d=32", "d=40", "d=56", "d=64", "d=72",
                                         "d=80", "d=96", "d=128", "d=160", "d=192", "d=256",
                                         "d=192 dv=128"),
                         dims_name);

class LongLengths : public Dims {};

TEST_P(LongLengths, PastEveryTileTable) {
  size_t turn = 0;
  for (const char* dtype : kDTypes) {
    for (const char* lengths : {"q=4097 kv=4097", "q=1 kv=20001", "q=70 kv=9001"}) {
      expect("hq=2 hkv=1 " + std::string(lengths) + " " + kMasks[turn++ % 4] + " dtype=" + dtype);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(HeadDims, LongLengths,
                         testing::Values("d=64", "d=128", "d=256", "d=192 dv=128"), dims_name);

}  // namespace
}  // namespace fovea::test
