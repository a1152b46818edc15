// A layer's call on a GPU whose tensors are copies of the host's: poisoned memory around them, the
// results brought back to where the host's call would have left them.
#pragma once

#include <cuda_runtime_api.h>

#include <deque>

#include "harness/device_tensors.h"
#include "layers/layer_trial.h"
#include "stream.h"

namespace fovea::test {

// Copies of the host's tensors on the first GPU.
class DeviceCopies {
 public:
  // A copy of what the host has there now, with room for the strides of the view, as far behind a
  // multiple of 16 bytes as there; not given: not given.
  TensorView there(const TensorView& host);
  template <typename Weights>
  Weights there(Weights weights) {
    visit(weights, [&](const char*, TensorView& w) { w = there(w); });
    return weights;
  }
  LayerInputs there(const LayerInputs& in);

  void upload() const;    // both wait: streams of tests do not wait for the one that copies
  void download() const;  // all of it, inputs too

 private:
  static constexpr size_t kWidestRead = 16;
  struct Copy {
    TensorView host;
    size_t offset = 0, bytes = 0;
    harness::DeviceBlock block;

    std::byte* data() const { return static_cast<std::byte*>(block.data()) + offset; }
  };
  std::deque<Copy> copies_;
};

// Scratch on the GPU, filled with bytes that no result may depend on, between guards.
class PoisonedMemory {
 public:
  explicit PoisonedMemory(size_t bytes) : memory_(bytes, 0) {
    fill();
    data = memory_.view().data;
  }
  void fill() { expect_ok(memory_.fill(harness::kPoisonByte)); }
  operator Workspace() const { return memory_.view(); }
  operator Saved() const { return {memory_.view().data, memory_.view().bytes}; }
  void expect_intact() const {
    const Result<bool> intact = memory_.canaries_intact();
    EXPECT_TRUE(intact.ok() && *intact) << "written outside of a workspace";
  }

 private:
  static void expect_ok(const Status& s) { EXPECT_TRUE(s.ok()) << s.message(); }
  harness::DeviceWorkspace memory_;

 public:
  void* data = nullptr;
};

// The forward, and in training the backward, call of a trial whose plan is a GPU's.
template <typename Weights>
class LayerOnDevice {
 public:
  explicit LayerOnDevice(Trial<Weights>& trial)
      : plan_(trial.plan),
        forward_(plan_.workspace_bytes(Pass::kForward)),
        backward_(plan_.workspace_bytes(Pass::kBackward)),
        saved_(plan_.saved_bytes()) {
    const LayerInputs inputs = copies_.there(static_cast<const LayerInputs&>(trial.call));
    static_cast<LayerInputs&>(call_) = inputs;
    call_.weights = copies_.there(trial.call.weights);
    call_.out = copies_.there(trial.call.out);
    static_cast<LayerInputs&>(back_) = inputs;
    back_.weights = call_.weights;
    back_.dout = copies_.there(trial.back.dout);
    back_.dquery = copies_.there(trial.back.dquery);
    back_.dkey = copies_.there(trial.back.dkey);
    back_.dvalue = copies_.there(trial.back.dvalue);
    back_.dweights = copies_.there(trial.back.dweights);
  }

  // Poison everywhere, and the host's tensors of now.
  void reset() {
    for (PoisonedMemory* memory : {&forward_, &backward_, &saved_}) memory->fill();
    copies_.upload();
  }
  void launch(cudaStream_t stream) {
    const Status forward = plan_.forward(call_, forward_, saved_, {stream});
    ASSERT_TRUE(forward.ok()) << forward.message();
    if (plan_.shape().use != LayerUse::kTraining) return;
    const Status backward = plan_.backward(back_, backward_, saved_, {stream});
    ASSERT_TRUE(backward.ok()) << backward.message();
  }
  void fetch() {
    copies_.download();
    for (const PoisonedMemory* memory : {&forward_, &backward_, &saved_}) memory->expect_intact();
  }
  void run() {
    reset();
    launch(nullptr);
    fetch();
  }

 private:
  LayerPlan<Weights> plan_;
  DeviceCopies copies_;
  PoisonedMemory forward_, backward_, saved_;
  LayerForward<Weights> call_;
  LayerBackward<Weights> back_;
};

}  // namespace fovea::test
