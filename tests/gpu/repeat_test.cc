// Property 14 on a GPU: the same call gives the same bits, again and again, on several streams and
// from a graph.
#include <memory>

#include "on_device.h"
#include "stream.h"

namespace fovea::test::repeat {
namespace {

using harness::Case;

class Repeat : public EveryEngine {};

constexpr int kTimes = 200;
constexpr const char* kDTypes[] = {"bf16", "f16", "f32", "f32 tf32"};

std::vector<std::byte> launch_once(OnDevice& on_device, cudaStream_t stream) {
  on_device.reset();
  const Status s = on_device.launch(stream);
  EXPECT_TRUE(s.ok()) << s.message();
  return on_device.result();
}

void expect_the_same_every_time(const Engine& engine, const Case& c) {
  OnDevice on_device(engine, c);
  const std::vector<std::byte> first = launch_once(on_device, nullptr);
  for (int n = 1; n < kTimes; ++n) {
    ASSERT_EQ(launch_once(on_device, nullptr) == first, true)
        << "call " << n << reproduce(engine, c);
  }
}

TEST_P(Repeat, ForwardGivesTheSameBits) {
  for (const char* dtype : kDTypes) {
    for (const char* shape : {"b=2 hq=4 hkv=2 q=300 kv=500 d=128 mask=causal",
                              "b=2 hq=8 hkv=1 q=1 kv=4000 d=64 sink",  // keys may be split
                              "b=3 hq=2 q=200 kv=200 d=80 varlen dropout=0.2"}) {
      expect_the_same_every_time(GetParam(), must_parse(std::string(shape) + " dtype=" + dtype));
    }
  }
}

TEST_P(Repeat, DeterministicBackwardGivesTheSameBits) {
  for (const char* dtype : kDTypes) {
    for (const char* shape : {"b=2 hq=4 hkv=2 q=300 kv=500 d=128 mask=causal sink",
                              "b=2 hq=4 hkv=1 q=200 kv=300 d=64 bias=bhq dbias"}) {
      expect_the_same_every_time(
          GetParam(),
          must_parse(std::string(shape) + " deterministic pass=fwd,bwd dtype=" + dtype));
    }
  }
}

TEST_P(Repeat, StreamsDoNotDisturbEachOther) {
  constexpr size_t kStreams = 4;
  for (const char* dtype : kDTypes) {
    const Case c = must_parse(
        "b=2 hq=4 hkv=2 q=200 kv=333 d=64 mask=causal deterministic pass=fwd,bwd dtype=" +
        std::string(dtype));
    OnDevice alone(GetParam(), c);
    const std::vector<std::byte> expected = launch_once(alone, nullptr);
    std::vector<OwnedStream> streams(kStreams);
    std::vector<std::unique_ptr<OnDevice>> copies;
    for (size_t n = 0; n < kStreams; ++n) {
      copies.push_back(std::make_unique<OnDevice>(GetParam(), c));
    }
    for (int time = 0; time < kTimes / 10; ++time) {
      for (auto& copy : copies) copy->reset();
      for (size_t n = 0; n < kStreams; ++n) {
        const Status s = copies[n]->launch(streams[n].get());
        ASSERT_TRUE(s.ok()) << s.message();
      }
      for (auto& copy : copies) {
        ASSERT_EQ(copy->result() == expected, true) << time << reproduce(GetParam(), c);
      }
    }
  }
}

// A kernel may come to the GPU before the one ahead of it has ended, but reads nothing until then.
TEST_P(Repeat, ACallReadsWhatTheOneBeforeItWrote) {
  for (const char* dtype : kDTypes) {
    for (const char* shape :
         {"b=2 hq=8 q=128 d=32", "b=4 hq=8 hkv=2 q=512 d=16 mask=causal", "b=1 hq=1 q=192 d=64",
          "b=2 hq=4 q=100 kv=100 d=64 varlen", "b=2 hq=4 q=700 d=64 mask=causal"}) {
      const Case c = must_parse(std::string(shape) + " dtype=" + dtype);
      OnDevice first(GetParam(), c), second(GetParam(), c);
      const std::vector<std::byte> left = launch_once(first, nullptr);
      second.reset();
      ASSERT_TRUE(second.launch_after(first, nullptr).ok());
      const std::vector<std::byte> expected = second.result();
      const OwnedStream stream;
      for (int time = 0; time < kTimes / 10; ++time) {
        first.reset();
        second.reset();
        ASSERT_TRUE(first.launch(stream.get()).ok());
        ASSERT_TRUE(second.launch_after(first, stream.get()).ok());
        ASSERT_EQ(second.result() == expected, true) << time << reproduce(GetParam(), c);
        ASSERT_EQ(first.result() == left, true) << time << reproduce(GetParam(), c);
      }
    }
  }
}

// A capture must take every launch and nothing else: an allocation or a wait would break it.
TEST_P(Repeat, GraphReplayIsTheDirectCall) {
  for (const char* dtype : kDTypes) {
    // The last takes the kernels whose sums have any order: here they have one summand.
    for (const char* shape :
         {"q=150 kv=260 d=64 deterministic mask=causal",
          "q=150 kv=260 d=64 deterministic keylens sink dropout=0.1",
          "q=150 kv=260 d=64 deterministic varlen mask=causal",
          "q=150 kv=260 d=64 deterministic bias=bh dbias softcap=10",
          "q=150 kv=260 d=64 deterministic logit_bound=1", "q=160 kv=100 d=32 mask=causal"}) {
      const Case c =
          must_parse("b=2 hq=4 hkv=2 pass=fwd,bwd " + std::string(shape) + " dtype=" + dtype);
      OnDevice on_device(GetParam(), c);
      const std::vector<std::byte> direct = launch_once(on_device, nullptr);
      const OwnedStream stream;
      ASSERT_CUDA(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal));
      const Status captured = on_device.launch(stream.get());
      cudaGraph_t graph = nullptr;
      ASSERT_CUDA(cudaStreamEndCapture(stream.get(), &graph));
      ASSERT_TRUE(captured.ok()) << captured.message() << reproduce(GetParam(), c);
      cudaGraphExec_t replay = nullptr;
      ASSERT_CUDA(cudaGraphInstantiateWithFlags(&replay, graph, 0));
      for (int time = 0; time < 3; ++time) {
        on_device.reset();
        ASSERT_CUDA(cudaGraphLaunch(replay, stream.get()));
        ASSERT_EQ(on_device.result() == direct, true) << time << reproduce(GetParam(), c);
      }
      ASSERT_CUDA(cudaGraphExecDestroy(replay));
      ASSERT_CUDA(cudaGraphDestroy(graph));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, Repeat, testing::ValuesIn(fast_engines()), engine_name);

}  // namespace
}  // namespace fovea::test::repeat
