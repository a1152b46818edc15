// The stream beside a layer's: one call has it at a time, and a capture until it ends.
#include "layers/cuda/side_stream.h"

#include <gtest/gtest.h>

#include <thread>

#include "gpu/stream.h"

namespace fovea::test {
namespace {

class SideStreamOnGpu : public testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no GPU";
    ASSERT_CUDA(side_.make());
  }
  layers::cuda::SideStream side_;
};

TEST_F(SideStreamOnGpu, IsLentToOneCallAtATime) {
  OwnedStream one, other;
  auto held = side_.lend(one.get());
  EXPECT_TRUE(held.owns_lock());
  std::thread([&] { EXPECT_FALSE(side_.lend(other.get()).owns_lock()); }).join();
  held.unlock();
  EXPECT_TRUE(side_.lend(other.get()).owns_lock());
}

TEST_F(SideStreamOnGpu, StaysWithACaptureUntilItEnds) {
  OwnedStream captured, other;
  ASSERT_CUDA(cudaStreamBeginCapture(captured.get(), cudaStreamCaptureModeThreadLocal));
  for (int time = 0; time < 2; ++time) {  // calls of the same capture share it
    const auto held = side_.lend(captured.get());
    EXPECT_TRUE(held.owns_lock());
    EXPECT_EQ(side_.follow(captured.get()), cudaSuccess);
    EXPECT_EQ(side_.lead(captured.get()), cudaSuccess);
  }
  EXPECT_FALSE(side_.lend(other.get()).owns_lock());
  cudaGraph_t graph = nullptr;
  ASSERT_CUDA(cudaStreamEndCapture(captured.get(), &graph));
  ASSERT_CUDA(cudaGraphDestroy(graph));
  EXPECT_TRUE(side_.lend(other.get()).owns_lock());
}

}  // namespace
}  // namespace fovea::test
