// Conversions of the 16-bit float formats: every value, and every boundary between two values.
#include "base/half.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

namespace fovea {
namespace {

F16 narrow(float x, F16) { return to_f16(x); }
Bf16 narrow(float x, Bf16) { return to_bf16(x); }

template <typename Half>
class EveryHalf : public testing::Test {};
using Halves = testing::Types<F16, Bf16>;
TYPED_TEST_SUITE(EveryHalf, Halves);

TYPED_TEST(EveryHalf, RoundTripsThroughFloat) {
  for (uint32_t bits = 0; bits <= 0xffffu; ++bits) {
    const TypeParam half{static_cast<uint16_t>(bits)};
    const float wide = to_float(half);
    const TypeParam back = narrow(wide, TypeParam{});
    if (std::isnan(wide)) {
      EXPECT_TRUE(std::isnan(to_float(back))) << bits;
    } else {
      ASSERT_EQ(back.bits, half.bits) << bits;
    }
  }
}

// Between neighbours a and b: below the middle goes to a, above it to b, the middle to the even.
TYPED_TEST(EveryHalf, RoundsToNearestEven) {
  for (uint32_t sign : {0u, 0x8000u}) {
    for (uint32_t magnitude = 0;; ++magnitude) {
      const TypeParam a{static_cast<uint16_t>(sign | magnitude)};
      const TypeParam b{static_cast<uint16_t>(sign | (magnitude + 1))};
      const float low = to_float(a), high = to_float(b);
      if (std::isinf(high)) break;
      const float middle = low + (high - low) / 2;
      ASSERT_EQ(narrow(std::nextafter(middle, low), TypeParam{}).bits, a.bits) << magnitude;
      ASSERT_EQ(narrow(std::nextafter(middle, high), TypeParam{}).bits, b.bits) << magnitude;
      ASSERT_EQ(narrow(middle, TypeParam{}).bits, (magnitude % 2 == 0 ? a : b).bits) << magnitude;
    }
  }
}

TYPED_TEST(EveryHalf, KeepsInfinityAndSignOfZero) {
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(to_float(narrow(inf, TypeParam{})), inf);
  EXPECT_EQ(to_float(narrow(-inf, TypeParam{})), -inf);
  EXPECT_EQ(narrow(-0.0f, TypeParam{}).bits, 0x8000u);
  EXPECT_TRUE(std::isnan(to_float(narrow(-std::nanf(""), TypeParam{}))));
}

TEST(F16Test, KnownValues) {
  EXPECT_EQ(to_f16(1.0f).bits, 0x3c00u);
  EXPECT_EQ(to_f16(-2.0f).bits, 0xc000u);
  EXPECT_EQ(to_f16(65504.0f).bits, 0x7bffu);
  EXPECT_EQ(to_f16(0x1p-24f).bits, 0x0001u);
  EXPECT_EQ(to_f16(0x1p-25f).bits, 0x0000u);  // tie, to even
  EXPECT_EQ(to_f16(0x1.000002p-25f).bits, 0x0001u);
}

TEST(F16Test, OverflowsAtTheMiddleToInfinity) {
  EXPECT_EQ(to_f16(std::nextafter(65520.0f, 0.0f)).bits, 0x7bffu);
  EXPECT_EQ(to_f16(65520.0f).bits, 0x7c00u);
  EXPECT_EQ(to_f16(-1e30f).bits, 0xfc00u);
}

TEST(Tf32Test, KeepsTenBitsOfMantissa) {
  EXPECT_EQ(round_to_tf32(1 + 0x1p-10f), 1 + 0x1p-10f);
  EXPECT_EQ(round_to_tf32(1 + 0x1p-11f), 1 + 0x1p-10f);  // a tie, away from zero
  EXPECT_EQ(round_to_tf32(-1 - 0x1p-11f), -1 - 0x1p-10f);
  EXPECT_EQ(round_to_tf32(1 + 0x1p-11f - 0x1p-23f), 1.0f);
  EXPECT_EQ(round_to_tf32(2 - 0x1p-12f), 2.0f);
  EXPECT_EQ(round_to_tf32(0x1.23cp-100f), 0x1.23cp-100f);
  EXPECT_TRUE(std::signbit(round_to_tf32(-0.0f)));
}

TEST(Tf32Test, KeepsWhatIsNotFinite) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(round_to_tf32(kInfinity), kInfinity);
  EXPECT_EQ(round_to_tf32(-kInfinity), -kInfinity);
  EXPECT_TRUE(std::isnan(round_to_tf32(std::bit_cast<float>(0x7fffffffu))));
}

TEST(Bf16Test, KnownValues) {
  EXPECT_EQ(to_bf16(1.0f).bits, 0x3f80u);
  EXPECT_EQ(to_bf16(3.140625f).bits, 0x4049u);
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::max()).bits, 0x7f80u);
}

}  // namespace
}  // namespace fovea
