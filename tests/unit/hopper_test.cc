// What of the Hopper engine needs no GPU: how wgmma is told where its operands lie, and which
// problems the engine gets.
#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <set>

#include "backend/cuda/device.h"
#include "backend/cuda/hopper/forward/cap_series.h"
#include "plan/choose.h"
#include "prim/cuda/tile/swizzled.h"

namespace fovea {
namespace {

using tile::SwizzledTile;

TEST(Swizzled, PanelsOfSixtyFourColumns) {
  using Tile = SwizzledTile<64, 128>;
  EXPECT_EQ(Tile::kPanels, 2);
  EXPECT_EQ(Tile::kPanelBytes, 64 * 128);
  EXPECT_EQ(Tile::kBytes, 64 * 128 * 2);
  EXPECT_EQ((SwizzledTile<64, 96>::kPanels), 2);  // the second half empty
}

// Within a row of a panel, 16-byte piece c lies at c xor (row mod 8); pieces 8 on are the next
// panel's.
TEST(Swizzled, PiecesOfARow) {
  using Tile = SwizzledTile<64, 128>;
  EXPECT_EQ(Tile::offset(0, 0), 0u);
  EXPECT_EQ(Tile::offset(0, 3), 48u);
  EXPECT_EQ(Tile::offset(1, 0), 128u + 16u);
  EXPECT_EQ(Tile::offset(5, 3), 5u * 128u + 6u * 16u);
  EXPECT_EQ(Tile::offset(13, 3), 13u * 128u + 6u * 16u);
  EXPECT_EQ(Tile::offset(2, 9), 64u * 128u + 2u * 128u + 3u * 16u);
  std::set<uint32_t> places;
  for (int row = 0; row < 64; ++row) {
    for (int piece = 0; piece < 16; ++piece) places.insert(Tile::offset(row, piece));
  }
  EXPECT_EQ(places.size(), 64u * 16u);
  EXPECT_EQ(*places.rbegin(), static_cast<uint32_t>(Tile::kBytes) - 16u);
}

// Rows of 64 bytes: piece c lies at c xor (row / 2 mod 4).
TEST(Swizzled, NarrowRows) {
  using Tile = tile::NarrowTile<64>;
  EXPECT_EQ(Tile::kBytes, 64 * 64);
  EXPECT_EQ(Tile::offset(1, 3), 64u + 48u);
  EXPECT_EQ(Tile::offset(2, 0), 2u * 64u + 16u);
  EXPECT_EQ(Tile::offset(15, 1), 15u * 64u + 2u * 16u);
  // 512 bytes from eight rows to the next, 64-byte swizzle.
  EXPECT_EQ(tile::narrow_descriptor(0x400),
            (uint64_t{2} << 62) | (uint64_t{32} << 32) | (uint64_t{1} << 16) | 0x40u);
  EXPECT_EQ(tile::narrow_step_of_rows(1), 16u * 64u / 16u);
  // 128 bytes from eight rows to the next, none from eight columns to the next, no swizzle.
  EXPECT_EQ(tile::plain_descriptor(0x400), (uint64_t{8} << 32) | 0x40u);
}

TEST(Swizzled, Descriptor) {
  // Address 0x400 / 16, leading offset 0x4000 / 16, 1024 bytes from eight rows to the next,
  // 128-byte swizzle.
  EXPECT_EQ(tile::matrix_descriptor(0x400, 0x4000),
            (uint64_t{1} << 62) | (uint64_t{64} << 32) | (uint64_t{0x400} << 16) | 0x40u);
  // A block's rank in its cluster must not reach the other fields.
  EXPECT_EQ(tile::matrix_descriptor(0x01000400, 16), tile::matrix_descriptor(0x400, 16));
}

TEST(Swizzled, StepsOfDescriptors) {
  using Tile = SwizzledTile<128, 128>;
  EXPECT_EQ(tile::step_of_columns<Tile>(1), 2u);  // 16 columns of 2 bytes
  EXPECT_EQ(tile::step_of_columns<Tile>(3), 6u);
  EXPECT_EQ(tile::step_of_columns<Tile>(4), 128u * 128u / 16u);  // the next panel
  EXPECT_EQ(tile::step_of_rows(1), 16u * 128u / 16u);
}

TEST(CapSeries, IsNearTanhBelowItsLimit) {
  using cuda::hopper::CapSeries;
  for (const double bound : {0.5, 3.0, 30.0, 64.0}) {
    for (const double scale : {0.125, 0.7}) {
      const CapSeries cap = CapSeries::of(scale, bound);
      const auto lack = [&](float x) { return std::fma(x, x, cap.minus_square); };
      for (int i = -99; i <= 99; ++i) {
        const double score = 0.01 * i * bound / 4;
        const auto x = static_cast<float>(score / scale);
        EXPECT_LT(lack(x), 0);
        const double expected = bound * std::tanh(score / bound) * std::numbers::log2e;
        EXPECT_NEAR(std::fma(cap.third, lack(x), cap.first) * x, expected, 1.2e-5 * bound)
            << score << " of " << bound;
      }
      EXPECT_GT(lack(static_cast<float>(1.01 * bound / 4 / scale)), 0);
    }
  }
}

class HopperChoice : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda_backends().empty()) GTEST_SKIP() << "built without CUDA";
    gpu_.device = Device::cuda(0);
    gpu_.gpu = {"NVIDIA H200", 90, 132, 232448, 60 << 20, int64_t{140} << 30};
    problem_.batch = 4;
    problem_.head_q = problem_.head_kv = 16;
    problem_.q_len = problem_.kv_len = 2048;
    problem_.dim_qk = problem_.dim_v = 128;
    problem_.dtype = DType::kBf16;
  }

  // The engine that is chosen, and why not the Hopper engine where it is another.
  std::pair<std::string, std::string> chosen() const {
    const auto choice = choose(problem_, gpu_, "");
    if (!choice.ok()) return {"none", std::string(choice.status().message())};
    const bool passed = !choice->passed_over.empty();
    return {choice->backend->name(), passed ? choice->passed_over[0].reasons[0] : ""};
  }

  DeviceInfo gpu_;
  AttentionProblem problem_;
};

TEST_F(HopperChoice, TakesLargeProblems) {
  for (const DType dtype : {DType::kBf16, DType::kF16}) {
    problem_.dtype = dtype;
    for (const int64_t dim : {64, 72, 96, 128, 160, 256}) {
      problem_.dim_qk = problem_.dim_v = dim;
      EXPECT_EQ(chosen().first, "hopper") << dim << ": " << chosen().second;
    }
  }
  problem_.mask = Mask::window(100, 0);
  problem_.features = Feature::kSink | Feature::kKeyLengths;
  problem_.softcap = 30;
  EXPECT_EQ(chosen().first, "hopper") << chosen().second;
}

TEST_F(HopperChoice, CutsKeysWhereRowsAreFew) {
  problem_.batch = 1;
  problem_.head_q = problem_.head_kv = 8;
  problem_.q_len = 128;
  problem_.kv_len = 16384;
  const auto choice = choose(problem_, gpu_, "");
  ASSERT_TRUE(choice.ok());
  EXPECT_STREQ(choice->backend->name(), "hopper");
  const auto bound = choice->backend->bind(problem_, gpu_);
  EXPECT_NE(bound->describe().find("keys in 16 parts, 128 blocks"), std::string::npos)
      << bound->describe();
  // Sums, a reference and a weight of every row and part.
  EXPECT_GE(bound->workspace_bytes(Pass::kForward), size_t{16 * 8 * 128 * (128 + 2) * 4});
  problem_.batch = 16;
  const std::string whole = choose(problem_, gpu_, "")->backend->bind(problem_, gpu_)->describe();
  EXPECT_EQ(whole.find(" parts, "), std::string::npos) << whole;
}

TEST_F(HopperChoice, KeysOfShortProblemsAreResident) {
  problem_.q_len = problem_.kv_len = 256;
  problem_.dim_qk = problem_.dim_v = 64;
  const auto is_resident = [&] {
    const auto choice = choose(problem_, gpu_, "");
    return choice.ok() &&
           choice->backend->bind(problem_, gpu_)->name().find("/resident") != std::string::npos;
  };
  EXPECT_TRUE(is_resident());
  problem_.batch = 5;  // 160 tiles for 132 multiprocessors
  EXPECT_FALSE(is_resident());
  problem_.batch = 2;
  problem_.kv_len = 513;
  EXPECT_FALSE(is_resident());
  problem_.kv_len = 512;
  EXPECT_TRUE(is_resident());
  problem_.softcap = 30;
  EXPECT_FALSE(is_resident());
}

// Small heads are the portable engine's, but for the backward pass of some.
TEST_F(HopperChoice, TakesTheBackwardPassOfSmallHeads) {
  problem_.dim_qk = problem_.dim_v = 32;
  problem_.head_kv = 4;
  problem_.mask = Mask::causal();
  const AttentionProblem plain = problem_;
  const auto choice = choose(problem_, gpu_, "");
  ASSERT_TRUE(choice.ok());
  EXPECT_STREQ(choice->backend->name(), "hopper");
  const std::string text = choice->backend->bind(problem_, gpu_)->describe();
  EXPECT_NE(text.find("backward by wgmma"), std::string::npos) << text;
  EXPECT_NE(text.find("one pass over tiles of 256 keys"), std::string::npos) << text;
  const auto expect_portable = [&](const char* what) {
    EXPECT_EQ(chosen().first, "portable") << what;
    problem_ = plain;
  };
  problem_.q_len = 2041;
  expect_portable("rows of heads that share keys do not fill fragments");
  problem_.determinism = Determinism::kRequired;
  expect_portable("the same bits");
  problem_.softcap = 30;
  expect_portable("softcap");
  problem_.batch = 1;
  problem_.q_len = problem_.kv_len = 256;
  expect_portable("too short");
}

// What was fastest on the H200; 0: left to the portable engine.
TEST_F(HopperChoice, CutsRowsOfSmallHeads) {
  struct Measured {
    int64_t batch, head_q, head_kv, length;
    bool causal;
    int parts;
  };
  problem_.dim_qk = problem_.dim_v = 32;
  for (const Measured& m : {
           Measured{4, 16, 4, 2048, true, 2},
           {4, 16, 4, 4096, true, 1},
           {4, 16, 4, 8192, true, 1},
           {1, 32, 8, 2048, true, 4},
           {1, 32, 8, 4096, true, 2},
           {1, 32, 8, 8192, true, 1},
           {1, 32, 8, 16384, true, 1},
           {1, 16, 4, 4096, true, 4},
           {8, 16, 4, 1024, true, 2},
           {16, 16, 4, 1024, true, 1},
           {2, 32, 8, 2048, false, 1},
           {1, 8, 8, 2048, true, 0},
           {32, 16, 4, 512, true, 0},
       }) {
    problem_.batch = m.batch;
    problem_.head_q = m.head_q;
    problem_.head_kv = m.head_kv;
    problem_.q_len = problem_.kv_len = m.length;
    problem_.mask = m.causal ? Mask::causal() : Mask{};
    const auto choice = choose(problem_, gpu_, "");
    ASSERT_TRUE(choice.ok());
    EXPECT_STREQ(choice->backend->name(), m.parts == 0 ? "portable" : "hopper") << m.length;
    if (m.parts == 0) continue;
    const std::string text = choice->backend->bind(problem_, gpu_)->describe();
    const std::string parts = std::to_string(m.parts) + (m.parts == 1 ? " part" : " parts");
    EXPECT_NE(text.find("tiles of 256 keys, their rows in " + parts), std::string::npos)
        << m.batch << " " << m.head_q << " " << m.length << ": " << text;
  }
}

TEST_F(HopperChoice, SaysWhyNot) {
  const AttentionProblem plain = problem_;
  const auto expect = [&](const char* reason) {
    EXPECT_EQ(chosen().first, "portable");
    EXPECT_EQ(chosen().second, reason);
    problem_ = plain;
  };
  problem_.dtype = DType::kF32;
  expect("dtype is f32, takes f16, bf16");
  problem_.features = Feature::kBias;
  expect("takes no problem with a bias");
  problem_.mask = Mask::causal().with_prefix(5);
  expect("takes no mask with a prefix");
  problem_.dim_qk = 36;
  expect("dim_qk is 36, takes multiples of 8");
  problem_.dim_qk = problem_.dim_v = 24;
  expect("head dims up to 32 are faster with the portable engine");
  problem_.batch = problem_.head_q = problem_.head_kv = 1;
  problem_.q_len = problem_.kv_len = 1000;
  expect(
      "rows and keys are 8 tiles: too few for 132 multiprocessors, which the portable engine keeps "
      "busy");
  problem_.head_kv = 4;
  problem_.q_len = 2;
  expect("the 2 queries of 4 heads that share keys are one tile with the portable engine");
  gpu_.gpu.sm = 80;
  expect("compute capability is 8.0, takes 9.0");
}

}  // namespace
}  // namespace fovea
