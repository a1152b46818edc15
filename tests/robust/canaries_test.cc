// The guards that other tests rely on: a byte written outside is seen.
#include "support/engines.h"

namespace fovea::test {
namespace {

using harness::Case;
using harness::CaseTensors;

// The canaries themselves: a byte past an output is seen.
TEST(Canaries, SeeAWriteOutside) {
  const Case c = must_parse("hq=2 q=3 kv=3 d=5 pad=2 order=bshd");
  CaseTensors t(c);
  EXPECT_TRUE(t.canaries_intact());
  auto* out = static_cast<float*>(t.forward().out.data);
  const float kept = out[5];
  out[5] = 1;  // the padding after the first row
  EXPECT_FALSE(t.canaries_intact());
  out[5] = kept;
  EXPECT_TRUE(t.canaries_intact());
  const float before = out[-1];
  out[-1] = 0;
  EXPECT_FALSE(t.canaries_intact());
  out[-1] = before;
  static_cast<float*>(t.forward().q.data)[0] += 1;
  EXPECT_FALSE(t.inputs_unchanged());
  harness::OwnedWorkspace workspace(100);
  static_cast<char*>(workspace.view().data)[100] = 0;
  EXPECT_FALSE(workspace.canaries_intact());
}

}  // namespace
}  // namespace fovea::test
