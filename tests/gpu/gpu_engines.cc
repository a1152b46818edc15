// The engines of the gpu rung: what the machine's first GPU prefers, and the portable engine, which
// takes everything; and the same as if the GPU were so small that every problem of a test fills it,
// for small and large problems go to different kernels.
#include <cstdio>

#include "support/engines.h"

namespace fovea::test {

std::vector<Engine> fast_engines() {
  return {{"best", "", Device::cuda(0), ""},
          {"best", "", Device::cuda(0), "1"},
          {"portable", "", Device::cuda(0), ""},
          {"portable", "", Device::cuda(0), "1"}};
}

std::vector<Engine> every_engine() { return fast_engines(); }

namespace {

// What FOVEA_GPU_ALLOW_UNSUPPORTED let pass must not look like a success.
class ReportSkipped : public testing::Environment {
 public:
  void TearDown() override {
    if (unsupported_count() == 0) return;
    std::printf("[ UNTESTED ] %lld problems were refused as unsupported, and allowed to be\n",
                static_cast<long long>(unsupported_count()));
  }
};

[[maybe_unused]] const testing::Environment* const kReport =
    testing::AddGlobalTestEnvironment(new ReportSkipped);

}  // namespace
}  // namespace fovea::test
