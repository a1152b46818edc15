// Philox 4x32-10 against the published known answers, and the words that dropout takes from it.
#include "base/philox.h"

#include <gtest/gtest.h>

namespace fovea {
namespace {

using Words = std::array<uint32_t, 4>;

// The kat_vectors file of Random123.
TEST(PhiloxTest, KnownAnswers) {
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  EXPECT_EQ(philox4x32({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}),
            (Words{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
  EXPECT_EQ(
      philox4x32({0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}, {0xa4093822u, 0x299f31d0u}),
      (Words{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}));
}

TEST(PhiloxTest, DropoutWordIsAPureFunctionOfItsElement) {
  const uint64_t seed = 0x299f31d0a4093822u;
  // Key j = 4 * 0x243f6a88 + w takes word w of the published block.
  const int64_t j = int64_t{4} * 0x243f6a88, i = 0x85a308d3, head = 0x13198a2e;
  const Words block{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u};
  for (int64_t w = 0; w < 4; ++w) {
    EXPECT_EQ(dropout_word(seed, 0x03707344u, head, i, j + w), block[static_cast<size_t>(w)]);
  }
}

TEST(PhiloxTest, HighHalvesOfSeedAndOffsetMatter) {
  const uint32_t word = dropout_word(1, 1, 0, 0, 0);
  EXPECT_NE(dropout_word(1 | (uint64_t{1} << 32), 1, 0, 0, 0), word);
  EXPECT_NE(dropout_word(1, 1 | (uint64_t{1} << 32), 0, 0, 0), word);
}

TEST(PhiloxTest, ThresholdKeepsTheRightShare) {
  EXPECT_EQ(dropout_threshold(0.0), 0u);  // every word is kept
  EXPECT_EQ(dropout_threshold(0.5), 0x80000000u);
  EXPECT_EQ(dropout_threshold(0.9999999999999999), 0xffffffffu);
  const uint32_t threshold = dropout_threshold(0.3);
  int dropped = 0;
  constexpr int kWords = 100000;
  for (int64_t j = 0; j < kWords; ++j) dropped += dropout_word(7, 0, 3, 5, j) < threshold;
  EXPECT_NEAR(static_cast<double>(dropped) / kWords, 0.3, 0.006);  // four standard deviations
}

}  // namespace
}  // namespace fovea
