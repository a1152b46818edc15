// Random valid problems on every engine against the oracle. FOVEA_FUZZ_VALID says how many,
// FOVEA_FUZZ_SEED where to start; a failure names the case.
#include <cstdlib>

#include "support/engines.h"
#include "support/random_case.h"

namespace fovea::test {
namespace {

uint64_t number_from(const char* variable, uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

class FuzzValid : public EngineTest {};

TEST_F(FuzzValid, EveryEngineKeepsTheContract) {
  const uint64_t count = number_from("FOVEA_FUZZ_VALID", 300);
  const uint64_t first = number_from("FOVEA_FUZZ_SEED", 1);
  const std::vector<Engine> engines = every_engine();
  for (uint64_t seed = first; seed < first + count; ++seed) {
    expect_accurate(engines, random_case(seed));
    ASSERT_FALSE(HasFatalFailure());
  }
}

}  // namespace
}  // namespace fovea::test
