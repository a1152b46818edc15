// The harness's copies on a GPU: what goes there comes back, and a byte written outside is seen.
#include <cuda_runtime_api.h>

#include "harness/device_tensors.h"
#include "support/engines.h"
#include "support/values.h"

namespace fovea::test::harness_there {
namespace {

using harness::Case;
using harness::CaseTensors;
using harness::DeviceTensors;
using harness::DeviceWorkspace;

class DeviceHarness : public EngineTest {
 protected:
  const Case case_ = must_parse(
      "b=2 hq=4 hkv=2 q=7 kv=9 d=5 pad=3 order=bshd bias=bh dbias boolmask=full alibi sink keylens "
      "dlse pass=fwd,bwd dtype=bf16");
};

void expect_ok(const Status& s) { EXPECT_TRUE(s.ok()) << s.message(); }

void write_byte(void* at) {
  const unsigned char byte = 0x5A;
  EXPECT_EQ(cudaMemcpy(at, &byte, 1, cudaMemcpyHostToDevice), cudaSuccess);
}

TEST_F(DeviceHarness, WhatGoesThereComesBack) {
  CaseTensors here(case_), expected(case_);
  fill_values(here.forward().out, 2);
  fill_values(expected.forward().out, 2);
  DeviceTensors there(here, 0);
  expect_ok(there.upload());
  here.poison_outputs();
  fill_values(here.forward().q, 0);
  expect_ok(there.download());
  EXPECT_EQ(bits_of(here.forward().out), bits_of(expected.forward().out));
  EXPECT_EQ(bits_of(here.forward().q), bits_of(expected.forward().q));
  EXPECT_TRUE(here.canaries_intact());
  EXPECT_TRUE(here.inputs_unchanged());
}

TEST_F(DeviceHarness, ViewsKeepTheirShapeAndPointAtTheDevice) {
  CaseTensors here(case_);
  here.forward().k.strides[0] = 0;  // as a test may
  DeviceTensors there(here, 0);
  expect_ok(there.upload());
  const BackwardTensors moved = there.backward();
  const BackwardTensors& host = here.backward();
  for (const auto& [a, b] :
       {std::pair(moved.q, host.q), std::pair(moved.mask, host.mask),
        std::pair(moved.key_lengths, host.key_lengths), std::pair(moved.dlse, host.dlse),
        std::pair(moved.dbias, host.dbias), std::pair(moved.dsink, host.dsink)}) {
    EXPECT_EQ(a.device, Device::cuda(0));
    EXPECT_EQ(a.sizes, b.sizes);
    EXPECT_EQ(a.strides, b.strides);
    EXPECT_NE(a.data, nullptr);
    EXPECT_NE(a.data, b.data);
  }
  EXPECT_EQ(there.forward().k.strides[0], 0);
  EXPECT_FALSE(moved.cu_seqlens_q.given());
}

TEST_F(DeviceHarness, SeesAWriteOutside) {
  const auto damaged = [&](int64_t elements, const TensorView ForwardTensors::*tensor) {
    CaseTensors here(case_);
    DeviceTensors there(here, 0);
    expect_ok(there.upload());
    const TensorView view = there.forward().*tensor;
    write_byte(static_cast<char*>(view.data) + elements * dtype_bytes(view.dtype));
    expect_ok(there.download());
    return !here.canaries_intact();
  };
  EXPECT_FALSE(damaged(0, &ForwardTensors::out));
  EXPECT_TRUE(damaged(-1, &ForwardTensors::out));
  EXPECT_TRUE(damaged(5, &ForwardTensors::out));  // the padding after the first row
  EXPECT_TRUE(damaged(2 * 7 * 4 * (5 + 3), &ForwardTensors::out));
  EXPECT_TRUE(damaged(2 * 4 * 7, &ForwardTensors::lse));
}

TEST_F(DeviceHarness, SeesAWriteToAnInput) {
  CaseTensors here(case_);
  DeviceTensors there(here, 0);
  expect_ok(there.upload());
  write_byte(there.forward().key_lengths.data);
  expect_ok(there.download());
  EXPECT_FALSE(here.inputs_unchanged());
}

TEST_F(DeviceHarness, WorkspaceIsFilledAndGuarded) {
  for (const size_t bytes : {size_t{0}, size_t{100}, size_t{4096}}) {
    DeviceWorkspace workspace(bytes, 0);
    expect_ok(workspace.fill(harness::kPoisonByte));
    std::vector<unsigned char> held(bytes);
    ASSERT_EQ(cudaMemcpy(held.data(), workspace.view().data, bytes, cudaMemcpyDeviceToHost),
              cudaSuccess);
    EXPECT_EQ(held, std::vector<unsigned char>(bytes, 0xFF));
    EXPECT_TRUE(*workspace.canaries_intact());
    write_byte(static_cast<char*>(workspace.view().data) + bytes);
    EXPECT_FALSE(*workspace.canaries_intact());
  }
}

}  // namespace
}  // namespace fovea::test::harness_there
