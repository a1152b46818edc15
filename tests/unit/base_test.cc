// Checked sizes and the text of refusals.
#include <gtest/gtest.h>

#include <limits>

#include "base/checked.h"
#include "base/refusal.h"
#include "fovea/version.h"

namespace fovea {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
constexpr int64_t kMin = std::numeric_limits<int64_t>::min();

TEST(CheckedTest, Add) {
  EXPECT_EQ(checked_add(2, 3), 5);
  EXPECT_EQ(checked_add(kMax, 0), kMax);
  EXPECT_EQ(checked_add(kMax, 1), std::nullopt);
  EXPECT_EQ(checked_add(kMin, -1), std::nullopt);
}

TEST(CheckedTest, Multiply) {
  EXPECT_EQ(checked_mul(int64_t{1} << 31, int64_t{1} << 31), int64_t{1} << 62);
  EXPECT_EQ(checked_mul(int64_t{1} << 32, int64_t{1} << 31), std::nullopt);
  EXPECT_EQ(checked_mul(kMin, -1), std::nullopt);
  EXPECT_EQ(checked_mul(kMax, 0), 0);
}

TEST(CheckedTest, Product) {
  EXPECT_EQ(checked_product({}), 1);
  EXPECT_EQ(checked_product({2, 3, 7}), 42);
  EXPECT_EQ(checked_product({kMax, 2, 0}), std::nullopt);
  EXPECT_EQ(checked_product({0, kMax, 2}), 0);
}

TEST(RefusalTest, NamesArgumentValueAndRule) {
  const Status s = refuse("forward", "k.dim_qk", show(int64_t{96}), must_equal("q.dim_qk", 128));
  EXPECT_EQ(s.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(s.message(), "forward: k.dim_qk is 96, must equal q.dim_qk = 128");
  EXPECT_EQ(refuse("backward", "dbias", "given", but("the problem has no bias")).message(),
            "backward: dbias is given but the problem has no bias");
  EXPECT_EQ(refuse("forward", "key_lengths[3]", "4100", must_be_in(0, 4096)).message(),
            "forward: key_lengths[3] is 4100, must be in 0..4096");
}

TEST(RefusalTest, UnsupportedListsReasonsInColumns) {
  const Status s = unsupported("make_plan", "no backend takes this problem on this device",
                               {{"hopper", {"dim_qk is 320, takes 16..256"}},
                                {"portable", {"dim_qk is 320, takes 8..256", "no dropout"}}},
                               "the reference backend does");
  EXPECT_EQ(s.code(), StatusCode::kUnsupported);
  EXPECT_EQ(s.message(),
            "make_plan: no backend takes this problem on this device\n"
            "  hopper    dim_qk is 320, takes 16..256\n"
            "  portable  dim_qk is 320, takes 8..256\n"
            "            no dropout\n"
            "  hint: the reference backend does");
}

TEST(RefusalTest, ShowsValues) {
  EXPECT_EQ(show(0.5), "0.5");
  EXPECT_EQ(show(std::numeric_limits<double>::infinity()), "inf");
  EXPECT_EQ(show(DType::kBf16), "bf16");
  EXPECT_EQ(show(static_cast<DType>(77)), "dtype 77");
  EXPECT_EQ(show(Device::cuda(3)), "cuda:3");
  EXPECT_EQ(show(Device{static_cast<DeviceType>(9), 0}), "device type 9");
  EXPECT_EQ(show(static_cast<const void*>(nullptr)), "null");
}

TEST(VersionTest, IsThatOfTheHeaders) {
  const std::string expected = std::to_string(FOVEA_VERSION_MAJOR) + "." +
                               std::to_string(FOVEA_VERSION_MINOR) + "." +
                               std::to_string(FOVEA_VERSION_PATCH);
  EXPECT_EQ(version(), expected);
}

}  // namespace
}  // namespace fovea
