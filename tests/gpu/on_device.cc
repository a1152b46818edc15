// A case that stays on the GPU between calls.
#include "on_device.h"

namespace fovea::test {

OnDevice::OnDevice(const Engine& engine, const harness::Case& c)
    : case_(c),
      engine_(engine),
      plan_(plan_on(engine, c.problem)),
      host_(c),
      there_(host_, engine.device.index),
      forward_space_(plan_.workspace_bytes(Pass::kForward), engine.device.index),
      backward_space_(plan_.workspace_bytes(Pass::kBackward), engine.device.index) {}

void OnDevice::reset() {
  host_.poison_outputs();
  for (const Status& s : {there_.upload(), forward_space_.fill(harness::kPoisonByte),
                          backward_space_.fill(harness::kPoisonByte)}) {
    ASSERT_TRUE(s.ok()) << s.message();
  }
}

Status OnDevice::launch(cudaStream_t stream) {
  Status s = plan_.forward(there_.forward(), forward_space_.view(), {stream});
  if (s.ok() && case_.backward) {
    s = plan_.backward(there_.backward(), backward_space_.view(), {stream});
  }
  skip_if_allowed(engine_, s);
  return s;
}

Status OnDevice::launch_after(const OnDevice& before, cudaStream_t stream) {
  ForwardTensors t = there_.forward();
  t.q = before.there_.forward().out;
  return plan_.forward(t, forward_space_.view(), {stream});
}

std::vector<std::byte> OnDevice::result() {
  const Status done = there_.download();
  EXPECT_TRUE(done.ok()) << done.message();
  EXPECT_TRUE(host_.canaries_intact()) << harness::format_case(case_);
  EXPECT_TRUE(host_.inputs_unchanged()) << harness::format_case(case_);
  for (const harness::DeviceWorkspace* space : {&forward_space_, &backward_space_}) {
    const Result<bool> intact = space->canaries_intact();
    EXPECT_TRUE(intact.ok() && *intact) << harness::format_case(case_);
  }
  std::vector<std::byte> bytes;
  for (const harness::GuardedBuffer* buffer : host_.buffers()) {
    bytes.insert(bytes.end(), buffer->block(), buffer->block() + buffer->block_bytes());
  }
  return bytes;
}

}  // namespace fovea::test
