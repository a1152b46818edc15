// Property 14 on a GPU, many times over: a race shows once in a while, so every case is called a
// thousand times while another stream keeps the memory busy.
#include <cstring>

#include "harness/device_tensors.h"
#include "stream.h"
#include "support/engines.h"

namespace fovea::test::thousand {
namespace {

using harness::Case;
using harness::CaseTensors;
using harness::DeviceBlock;
using harness::DeviceTensors;
using harness::DeviceWorkspace;

class Thousand : public EveryEngine {};

constexpr int kTimes = 1000;
constexpr size_t kNoiseBytes = size_t{64} << 20;

size_t bytes_of(const TensorView& t) {
  return static_cast<size_t>(t.elements() * dtype_bytes(t.dtype));
}

// What a case writes, as dense blocks of the device.
std::vector<TensorView> outputs_of(const DeviceTensors& there) {
  std::vector<TensorView> given;
  const BackwardTensors t = there.backward();
  for (const TensorView& view : {t.out, t.lse, t.dq, t.dk, t.dv, t.dbias, t.dsink}) {
    if (view.given() && bytes_of(view) > 0) given.push_back(view);
  }
  return given;
}

class Subject {
 public:
  Subject(const Engine& engine, const Case& c)
      : case_(c),
        plan_(plan_on(engine, c.problem)),
        host_(c),
        there_(host_, engine.device.index),
        forward_space_(plan_.workspace_bytes(Pass::kForward), engine.device.index),
        backward_space_(plan_.workspace_bytes(Pass::kBackward), engine.device.index) {}

  Status prepare() {
    if (Status s = there_.upload(); !s.ok()) return s;
    if (Status s = forward_space_.fill(harness::kPoisonByte); !s.ok()) return s;
    if (Status s = backward_space_.fill(harness::kPoisonByte); !s.ok()) return s;
    if (Status s = noise_.reserve(2 * kNoiseBytes, 0); !s.ok()) return s;
    outputs_ = outputs_of(there_);
    size_t bytes = 0;
    for (const TensorView& t : outputs_) bytes += bytes_of(t);
    found_.resize(bytes);
    return {};
  }

  // The passes on poisoned outputs, with copies beside them on every other call.
  void call(int n) {
    if (n % 2 == 1) {
      ASSERT_CUDA(cudaMemcpyAsync(noise_.data(), noise_.data() + kNoiseBytes, kNoiseBytes,
                                  cudaMemcpyDeviceToDevice, beside_.get()));
    }
    for (const TensorView& t : outputs_) {
      ASSERT_CUDA(cudaMemsetAsync(t.data, harness::kPoisonByte, bytes_of(t), stream_.get()));
    }
    Status s = plan_.forward(there_.forward(), forward_space_.view(), {stream_.get()});
    if (s.ok() && case_.backward) {
      s = plan_.backward(there_.backward(), backward_space_.view(), {stream_.get()});
    }
    ASSERT_TRUE(s.ok()) << s.message();
  }

  const std::vector<std::byte>& result() {
    std::byte* at = found_.data();
    for (const TensorView& t : outputs_) {
      EXPECT_EQ(cudaMemcpyAsync(at, t.data, bytes_of(t), cudaMemcpyDeviceToHost, stream_.get()),
                cudaSuccess);
      at += bytes_of(t);
    }
    EXPECT_EQ(cudaStreamSynchronize(stream_.get()), cudaSuccess);
    return found_;
  }

 private:
  Case case_;
  Plan plan_;
  CaseTensors host_;
  DeviceTensors there_;
  DeviceWorkspace forward_space_, backward_space_;
  DeviceBlock noise_;
  OwnedStream stream_, beside_;
  std::vector<TensorView> outputs_;
  std::vector<std::byte> found_;
};

void expect_the_same(const Engine& engine, const std::string& text) {
  const Case c = must_parse(text);
  Subject subject(engine, c);
  const Status prepared = subject.prepare();
  ASSERT_TRUE(prepared.ok()) << prepared.message();
  std::vector<std::byte> first;
  for (int n = 0; n < kTimes; ++n) {
    subject.call(n);
    if (testing::Test::HasFatalFailure()) return;
    const std::vector<std::byte>& found = subject.result();
    if (n == 0) first = found;
    ASSERT_TRUE(found == first) << "call " << n << " gave other bits than call 0"
                                << reproduce(engine, c);
  }
}

TEST_P(Thousand, ForwardGivesTheSameBits) {
  for (const char* dtype : {"bf16", "f32"}) {
    for (const char* shape : {"b=2 hq=8 hkv=2 q=200 kv=333 d=64 mask=causal",
                              "b=4 hq=8 hkv=1 q=1 kv=3000 d=128 keylens=3000,1,0,777",
                              "b=4 hq=4 hkv=2 q=150 kv=150 d=128 varlen mask=causal "
                              "q_lens=150,1,0,77 kv_lens=150,9,13,140"}) {
      expect_the_same(GetParam(), std::string(shape) + " dtype=" + dtype);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(Thousand, DeterministicBackwardGivesTheSameBits) {
  for (const char* dtype : {"bf16", "f32"}) {
    for (const char* shape : {"b=2 hq=8 hkv=2 q=200 kv=333 d=64 mask=causal sink",
                              "b=1 hq=4 hkv=4 q=130 kv=257 d=128 bias=bhq dbias",
                              "b=4 hq=4 hkv=2 q=150 kv=150 d=128 varlen mask=causal "
                              "q_lens=150,1,0,77 kv_lens=150,9,13,140"}) {
      expect_the_same(GetParam(),
                      std::string(shape) + " deterministic pass=fwd,bwd dtype=" + dtype);
      if (HasFatalFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, Thousand, testing::ValuesIn(fast_engines()), engine_name);

}  // namespace
}  // namespace fovea::test::thousand
