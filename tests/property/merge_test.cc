// Properties of merge that need no engine.
#include <cmath>

#include "support/engines.h"
#include "support/values.h"

namespace fovea::test {
namespace {

using harness::Case;
using harness::CaseTensors;

TEST(Merge, NothingIsItsIdentity) {
  for (const char* dtype : {"f32", "bf16", "f16"}) {
    const Case c = must_parse("b=1 hq=2 q=5 kv=4 d=8 dtype=" + std::string(dtype));
    CaseTensors some(c), nothing(c), merged(c);
    run({"reference", ""}, c, some);
    fill_values(nothing.forward().out, 0);
    fill_values(nothing.forward().lse, -INFINITY);
    const PartialResult one[] = {{nothing.forward().out, nothing.forward().lse},
                                 {some.forward().out, some.forward().lse}};
    ASSERT_TRUE(merge(one, 2, merged.forward().out, merged.forward().lse).ok());
    EXPECT_EQ(bits_of(merged.forward().out), bits_of(some.forward().out));
    EXPECT_EQ(bits_of(merged.forward().lse), bits_of(some.forward().lse));
    const PartialResult none[] = {one[0], one[0], one[0]};
    ASSERT_TRUE(merge(none, 3, merged.forward().out, merged.forward().lse).ok());
    for (const double x : values_of(merged.forward().out)) EXPECT_EQ(x, 0);
    for (const double x : values_of(merged.forward().lse)) EXPECT_EQ(x, -INFINITY);
  }
}

}  // namespace
}  // namespace fovea::test
