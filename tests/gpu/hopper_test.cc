// The Hopper engine: that it is the one that runs, its tiles and schedules against the oracle.
#include "backend/cuda/device.h"
#include "harness/accuracy.h"
#include "support/engines.h"

namespace fovea::test::hopper_engine {
namespace {

using harness::Case;
using harness::CaseTensors;

constexpr double kCost = 2e8;  // multiply-adds for the oracle, per case
constexpr const char* kDTypes[] = {"bf16", "f16"};

// With one SM every block has many tiles, and takes the kernels of large problems.
const std::vector<Engine> kEngines = {{"hopper", "", Device::cuda(0), ""},
                                      {"hopper", "", Device::cuda(0), "1"}};

class Hopper : public EngineTest {
 protected:
  void SetUp() override {
    EngineTest::SetUp();
    if (IsSkipped()) return;
    const Result<DeviceInfo> device = discover_cuda(Device::cuda(0));
    ASSERT_TRUE(device.ok()) << device.status().message();
    if (device->gpu.sm != 90) GTEST_SKIP() << device->gpu.name << " is no Hopper GPU";
  }
};

TEST_F(Hopper, TilesAndTails) {
  for (const char* dtype : kDTypes) {
    for (const char* dims : {"d=64", "d=128", "d=40 dv=64", "d=8 dv=128", "d=104 dv=16", "d=96",
                             "d=72", "d=192 dv=128", "d=192", "d=256", "d=200 dv=248"}) {
      for (const char* lengths :
           {"q=1 kv=1", "q=63 kv=65", "q=64 kv=64", "q=129 kv=127", "q=257 kv=300", "q=300 kv=700",
            "q=700 kv=300", "q=193 kv=1024"}) {
        for (const char* mask : {"mask=none", "mask=causal", "mask=window:70:9"}) {
          expect_accurate(kEngines,
                          "b=2 hq=4 hkv=2 " + std::string(lengths) + " " + dims + " " + mask +
                              " dtype=" + dtype,
                          kCost);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_F(Hopper, FeaturesAndLayouts) {
  for (const char* dtype : kDTypes) {
    for (const char* dims : {"d=64", "d=128", "d=80", "d=192 dv=128", "d=256"}) {
      for (const char* extra :
           {"varlen", "varlen mask=causal", "varlen mask=window:33:0 sink", "keylens",
            "keylens=0,5,300 mask=causal", "sink", "sink mask=causal", "mask=window:20:inf",
            "mask=window:inf:40", "scale=0.7", "softcap=20", "softcap=3 mask=causal sink",
            "order=bshd pad=8", "order=bhsd pad=16 varlen",
            "q_lens=0,1,300 kv_lens=300,0,64 varlen mask=causal"}) {
        expect_accurate(
            kEngines,
            "b=3 hq=6 hkv=3 q=300 kv=300 " + std::string(dims) + " " + extra + " dtype=" + dtype,
            kCost);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Their backward pass: tails of rows and keys, groups, parts of rows, tensors that TMA does not
// take.
TEST_F(Hopper, SmallHeads) {
  const Engine few = {"hopper", "", Device::cuda(0), "5"};  // whose SMs get parts of the rows
  const std::vector<Engine> engines = {kEngines[1], few};
  const Case one = must_parse("b=2 hq=4 hkv=2 q=304 kv=300 d=32 dtype=bf16 pass=fwd,bwd");
  const std::string whole = plan_on(engines[0], one.problem).explain();
  EXPECT_NE(whole.find("backward by wgmma"), std::string::npos) << whole;
  EXPECT_NE(whole.find("their rows in 1 part"), std::string::npos) << whole;
  const Case long_one = must_parse("hq=4 hkv=1 q=1024 d=32 dtype=bf16 pass=fwd,bwd mask=causal");
  const std::string cut = plan_on(few, long_one.problem).explain();
  EXPECT_NE(cut.find("backward by wgmma"), std::string::npos) << cut;
  EXPECT_NE(cut.find(" parts\n"), std::string::npos) << cut;
  for (const char* dtype : kDTypes) {
    for (const char* heads :
         {"hq=4 hkv=1 q=16 kv=700", "hq=4 hkv=2 q=304 kv=300", "hq=6 hkv=2 q=528 kv=520",
          "hq=2 q=301 kv=511", "hq=2 q=700 kv=257", "b=3 hq=2 hkv=1 q=256 kv=512"}) {
      for (const char* rest :
           {"mask=none", "mask=causal", "mask=window:70:9", "mask=window:inf:40 sink",
            "keylens mask=causal", "dlse mask=causal", "scale=0.7", "pad=1", "order=bshd pad=8",
            "scale=0.6931471805599453 keylens mask=window:70:9",
            "scale=0.6931471805599453 data=large_logits mask=causal"}) {
        expect_accurate(
            engines, std::string(heads) + " d=32 pass=fwd,bwd " + rest + " dtype=" + dtype, kCost);
        if (HasFatalFailure()) return;
      }
    }
    expect_accurate({few},
                    "hq=4 hkv=1 q=1024 d=32 pass=fwd,bwd mask=causal dtype=" + std::string(dtype),
                    kCost);
  }
}

// Tensors that TMA does not take go to the portable engine, by the same plan.
TEST_F(Hopper, UnalignedRows) {
  for (const char* pad : {"pad=1", "pad=4", "order=bshd pad=3"}) {
    expect_accurate(kEngines, "b=2 hq=4 hkv=2 q=200 kv=300 d=64 dtype=bf16 " + std::string(pad));
  }
}

TEST_F(Hopper, ManyTilesABlock) {
  for (const char* dtype : kDTypes) {
    for (const char* shape : {"b=3 hq=40 hkv=8 q=600 d=64", "b=3 hq=40 hkv=8 q=600 d=128",
                              "b=2 hq=8 hkv=2 q=2500 kv=3000 d=64", "b=2 hq=8 q=2500 d=128",
                              "b=2 hq=8 q=1000 d=256", "b=2 hq=8 q=1000 d=192 dv=128"}) {
      for (const char* mask : {"mask=none", "mask=causal", "varlen mask=causal"}) {
        expect_accurate(kEngines, std::string(shape) + " " + mask + " dtype=" + dtype, kCost);
      }
    }
  }
}

// Few rows and many keys: parts of the keys, and their merge.
TEST_F(Hopper, KeysInParts) {
  const Engine& engine = kEngines[0];
  const Case few = must_parse("hq=2 hkv=1 q=100 kv=5000 d=128 dtype=bf16");
  EXPECT_NE(plan_on(engine, few.problem).explain().find("keys in "), std::string::npos);
  const Case many_keys = must_parse("hq=8 q=100 kv=60000 d=128 mask=causal dtype=bf16");
  const std::string explained = plan_on(engine, many_keys.problem).explain();
  EXPECT_NE(explained.find("keys in "), std::string::npos) << explained;
  EXPECT_EQ(explained.find("claim"), std::string::npos) << explained;
  for (const char* dtype : kDTypes) {
    for (const char* dims : {"d=64", "d=128", "d=96", "d=192 dv=128", "d=256", "d=72 dv=40"}) {
      for (const char* rest :
           {"q=100 kv=5000", "q=300 kv=4097 mask=causal", "q=130 kv=6000 mask=window:2500:0",
            "q=70 kv=3000 sink mask=causal", "q=200 kv=3000 softcap=5", "q=64 kv=9000 b=2 keylens",
            "q=150 kv=4000 b=3 varlen mask=causal", "q=90 kv=4000 data=large_logits",
            "q=90 kv=4000 data=spiky mask=causal"}) {
        expect_accurate({engine},
                        "hq=2 hkv=1 " + std::string(rest) + " " + dims + " dtype=" + dtype, kCost);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// The classic softmax, where a plan asks for it: right, and by its own way.
TEST_F(Hopper, RunningMaximum) {
  for (const char* rest : {"d=64 mask=causal", "d=128", "d=128 data=large_logits"}) {
    const Case c = must_parse("b=2 hq=4 q=500 dtype=bf16 " + std::string(rest));
    const Result<Plan> plan = make_plan(c.problem, Device::cuda(0),
                                        {.backend = "hopper", .softmax = SoftmaxRule::kRunningMax});
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    EXPECT_NE(plan->explain().find("running maximum"), std::string::npos) << plan->explain();
    CaseTensors tensors(c);
    for (const harness::Accuracy& a :
         harness::measure_accuracy(c, *plan, tensors, Device::cuda(0), kCost)) {
      EXPECT_TRUE(a.ok) << a.tensor << ": error " << a.max_err << ", bound " << a.bound;
    }
  }
}

}  // namespace
}  // namespace fovea::test::hopper_engine
