// Memory grows with the length, never with its square.
#include <sys/resource.h>

#include "support/engines.h"

namespace fovea::test {
namespace {

using harness::Case;
using harness::CaseTensors;

class Memory : public EveryEngine {};

int64_t peak_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

TEST_P(Memory, WorkspaceIsLinear) {
  for (const char* dtype : {"f32", "bf16", "f16"}) {
    for (const char* extra :
         {"", "mask=causal", "mask=causal deterministic", "bias=bhq dbias", "sink dropout=0.1"}) {
      for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
        size_t before = 0;
        for (const int64_t length : {4096, 8192, 16384}) {
          const Case c = must_parse("hq=2 d=64 pass=fwd,bwd q=" + std::to_string(length) + " " +
                                    extra + " dtype=" + dtype);
          const size_t bytes = plan_on(GetParam(), c.problem).workspace_bytes(pass);
          // Twice, and a page for what does not grow.
          if (before != 0) {
            EXPECT_LE(bytes, 2 * before + 4096) << reproduce(GetParam(), c);
          }
          before = bytes;
        }
      }
    }
  }
}

// A run at q = kv = 16384 with one head stays far below its score matrix of 1 GiB in f32. The
// reference is left out: it would take minutes.
class MemoryOfRun : public FastEngine {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(MemoryOfRun);

TEST_P(MemoryOfRun, PeakStaysFarBelowAScoreMatrix) {
  const Case c = must_parse("hq=1 q=16384 d=64 dtype=bf16 mask=causal pass=fwd,bwd");
  CaseTensors t(c);
  const int64_t before = peak_bytes();
  run(GetParam(), c, t);
  const int64_t scores = int64_t{16384} * 16384 * 4;
  EXPECT_LT(peak_bytes() - before, scores / 8) << reproduce(GetParam(), c);
}

INSTANTIATE_TEST_SUITE_P(Engines, Memory, testing::ValuesIn(every_engine()), engine_name);
INSTANTIATE_TEST_SUITE_P(Engines, MemoryOfRun, testing::ValuesIn(fast_engines()), engine_name);

}  // namespace
}  // namespace fovea::test
