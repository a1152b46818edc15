// Random cases keep their meaning when written and read back.
#include "support/engines.h"
#include "support/random_case.h"

namespace fovea::test {
namespace {

TEST(CaseText, OfRandomCasesParsesBack) {
  for (uint64_t seed = 1; seed <= 2000; ++seed) {
    const harness::Case c = random_case(seed);
    EXPECT_EQ(must_parse(harness::format_case(c)), c) << harness::format_case(c);
  }
}

}  // namespace
}  // namespace fovea::test
