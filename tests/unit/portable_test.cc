// Which kernels the portable engine gives a problem: needs no GPU.
#include <gtest/gtest.h>

#include <numbers>

#include "backend/cuda/device.h"
#include "plan/choose.h"

namespace fovea {
namespace {

class PortableChoice : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda_backends().empty()) GTEST_SKIP() << "built without CUDA";
    gpu_.device = Device::cuda(0);
    gpu_.gpu = {"NVIDIA A100", 80, 108, 166912, 40 << 20, int64_t{80} << 30};
    problem_.batch = 4;
    problem_.head_q = problem_.head_kv = 16;
    problem_.q_len = problem_.kv_len = 2048;
    problem_.dim_qk = problem_.dim_v = 128;
    problem_.dtype = DType::kF32;
  }

  void take_small_heads() {
    problem_.dtype = DType::kBf16;
    problem_.head_q = 8;
    problem_.head_kv = 2;
    problem_.dim_qk = problem_.dim_v = 16;
    problem_.mask = Mask::causal();
  }

  // The kernel's name and what explain() says of it.
  std::pair<std::string, std::string> kernel() const {
    const auto choice = choose(problem_, gpu_, "portable");
    if (!choice.ok()) return {"none", std::string(choice.status().message())};
    const auto bound = choice->backend->bind(problem_, gpu_);
    return {bound->name(), bound->describe()};
  }

  DeviceInfo gpu_;
  AttentionProblem problem_;
};

TEST_F(PortableChoice, MultipliesFloatsExactlyUnlessTf32IsAllowed) {
  EXPECT_EQ(kernel().first, "portable/f32/d128");
  EXPECT_EQ(kernel().second.rfind("exact multiply-adds;", 0), 0u) << kernel().second;
  problem_.tf32 = Tf32::kAllowed;
  EXPECT_EQ(kernel().first, "portable/tf32/d128");
  EXPECT_EQ(kernel().second.rfind("mma.sync, f32 rounded to tf32;", 0), 0u) << kernel().second;
  problem_.features = Feature::kBias;
  EXPECT_EQ(kernel().first, "portable/tf32/d128/terms");
}

TEST_F(PortableChoice, Tf32HoldsEveryHeadDim) {
  problem_.tf32 = Tf32::kAllowed;
  const auto name_of = [&](int64_t dim_qk, int64_t dim_v) {
    problem_.dim_qk = dim_qk;
    problem_.dim_v = dim_v;
    return kernel().first;
  };
  EXPECT_EQ(name_of(8, 8), "portable/tf32/d64");
  EXPECT_EQ(name_of(24, 80), "portable/tf32/d128");
  EXPECT_EQ(name_of(192, 128), "portable/tf32/d256");
  EXPECT_EQ(name_of(256, 256), "portable/tf32/d256");
}

TEST_F(PortableChoice, Tf32IsNothingToHalves) {
  problem_.tf32 = Tf32::kAllowed;
  problem_.dtype = DType::kBf16;
  EXPECT_EQ(kernel().first, "portable/bf16/d128");
}

// One more block to a multiprocessor where there are many blocks; of exponents, where there are
// more than multiprocessors.
TEST_F(PortableChoice, ManyBlocksOfSmallHeadsAreCrowded) {
  take_small_heads();
  const auto crowded = [&](int64_t len) {
    problem_.q_len = problem_.kv_len = len;
    gpu_.gpu = {"NVIDIA H200", 90, 132, 232448, 50 << 20, int64_t{141} << 30};
    return kernel().first == "portable/bf16/d16/crowded";
  };
  EXPECT_TRUE(crowded(16384));
  EXPECT_FALSE(crowded(4096));
  problem_.scale = std::numbers::ln2;
  EXPECT_FALSE(crowded(4096));
  problem_.logit_bound = 16;
  EXPECT_TRUE(crowded(4096));
  EXPECT_TRUE(crowded(1024));
  EXPECT_FALSE(crowded(512));
  problem_.batch = 1;
  EXPECT_FALSE(crowded(2048));
}

// Larger stages of many rows, where two blocks to a multiprocessor still have the memory for them.
TEST_F(PortableChoice, ManyRowsOfSmallHeadsComeInLongTiles) {
  take_small_heads();
  const auto long_tiles = [&](int64_t len, int shared_bytes) {
    problem_.q_len = problem_.kv_len = len;
    gpu_.gpu = {"NVIDIA H200", 90, 132, shared_bytes, 50 << 20, int64_t{141} << 30};
    return kernel().second.find("128 at a time") != std::string::npos;
  };
  EXPECT_TRUE(long_tiles(16384, 232448));
  EXPECT_FALSE(long_tiles(16384, 166912));
  EXPECT_TRUE(long_tiles(4096, 232448));
  EXPECT_FALSE(long_tiles(4095, 232448));
  problem_.batch = 1;  // whose rows are cut evenly
  EXPECT_FALSE(long_tiles(4096, 232448));
  problem_.dim_qk = problem_.dim_v = 32;
  EXPECT_FALSE(long_tiles(16384, 232448));
}

// Blocks of all tiles of keys are about as long, where they all run at once; not where whole tiles
// of keys are too few to be even.
TEST_F(PortableChoice, FewKeysOfSmallHeadsHaveEvenPartsOfRows) {
  take_small_heads();
  gpu_.gpu = {"NVIDIA H200", 90, 132, 232448, 50 << 20, int64_t{141} << 30};
  const auto holds = [&](int64_t len, const char* text) {
    problem_.q_len = problem_.kv_len = len;
    return kernel().second.find(text) != std::string::npos;
  };
  EXPECT_TRUE(holds(1024, "their rows in up to 13 parts"));
  EXPECT_TRUE(holds(2048, "their rows in up to 7 parts"));
  EXPECT_TRUE(holds(4096, "their rows in 4 parts"));
  problem_.batch = 8;
  problem_.head_kv = 8;
  EXPECT_TRUE(holds(1024, "their rows in 2 parts"));
}

// Of problems with terms dq is added in turn; parts of rows would add to dk and dv.
TEST_F(PortableChoice, DeterministicBackwardWithTermsIsOnePassOfWholeRows) {
  const auto says = [&](const char* what) {
    return kernel().second.find(what) != std::string::npos;
  };
  problem_.dtype = DType::kBf16;
  problem_.batch = 1;
  problem_.head_q = problem_.head_kv = 1;
  problem_.dim_qk = problem_.dim_v = 64;
  EXPECT_TRUE(says("one pass over tiles of 128 keys, their rows in 13 parts")) << kernel().second;
  problem_.determinism = Determinism::kRequired;
  EXPECT_TRUE(says("dq by tiles of")) << kernel().second;
  problem_.softcap = 30;
  EXPECT_TRUE(says("one pass over tiles of 64 keys, their rows in 1 part")) << kernel().second;
  problem_.dim_qk = problem_.dim_v = 256;
  EXPECT_TRUE(says("dq by tiles of")) << kernel().second;
}

TEST_F(PortableChoice, LittleSharedMemoryIsEnoughForTwoKernelsOrThatOfAllTerms) {
  const auto says = [&](const char* what) {
    return kernel().second.find(what) != std::string::npos;
  };
  problem_.dtype = DType::kBf16;
  gpu_.gpu = {"NVIDIA GeForce RTX 4090", 89, 128, 101376, 72 << 20, int64_t{24} << 30};
  EXPECT_TRUE(says("dq by tiles of")) << kernel().second;
  problem_.softcap = 30;
  EXPECT_TRUE(says("one pass over tiles of 64 keys")) << kernel().second;
  problem_.dim_qk = problem_.dim_v = 64;
  problem_.softcap = 0;
  EXPECT_TRUE(says("one pass over tiles of 128 keys")) << kernel().second;
}

}  // namespace
}  // namespace fovea
