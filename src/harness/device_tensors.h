// The tensors of a case on a CUDA device: byte for byte those of the host, guards and padding too,
// so that the host's own checks see what a kernel did to them.
//
//   DeviceTensors there(tensors, 0);
//   DeviceWorkspace workspace(plan.workspace_bytes(Pass::kForward), 0);
//   Status s = there.upload();                       // waits; then workspace.fill(kPoisonByte)
//   s = plan.forward(there.forward(), workspace.view());
//   s = there.download();                            // waits; then tensors.canaries_intact(), ...
//
// What fills memory has filled it when it returns: streams of tests and of plans do not wait for
// the one that copies are queued on.
//
// Only in builds with CUDA (FOVEA_WITH_CUDA).
#pragma once

#include <memory>
#include <vector>

#include "harness/tensors.h"

namespace fovea::harness {

// Waits for all work on a device: the message of the first that failed.
Status wait_for_device(int index);

// Memory of a device, freed with its owner.
class DeviceBlock {
 public:
  Status reserve(size_t bytes, int index);
  std::byte* data() const { return block_.get(); }

 private:
  struct Free {
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte, Free> block_;
};

// Scratch between two guard lines, as OwnedWorkspace is on the host.
class DeviceWorkspace {
 public:
  DeviceWorkspace(size_t bytes, int index) : bytes_(bytes), index_(index) {}

  Status fill(int byte);  // all of it, and the guards anew; takes the memory the first time
  Workspace view() const { return {block_.data() + GuardedBuffer::kGuardBytes, bytes_}; }
  Result<bool> canaries_intact() const;

 private:
  DeviceBlock block_;
  size_t bytes_;
  int index_;
};

// Copies of buffers of the host, which must outlive them. Nothing is on the device before the first
// upload.
class DeviceCopies {
 public:
  DeviceCopies(const std::vector<const GuardedBuffer*>& buffers, int index);

  Status upload();    // all of it, as the host has it now
  Status download();  // all of it: a changed input shows on the host as well
  TensorView there(const TensorView& here) const;  // the same view of the device's memory

 private:
  struct Copy {
    const GuardedBuffer* host = nullptr;
    DeviceBlock block;
  };

  int index_;
  std::vector<Copy> copies_;
};

// A copy of every buffer of a case's tensors, which must outlive it.
class DeviceTensors : public DeviceCopies {
 public:
  DeviceTensors(CaseTensors& host, int index) : DeviceCopies(host.buffers(), index), host_(host) {}

  ForwardTensors forward() const;  // the host's views of now, of the device's memory
  BackwardTensors backward() const;

 private:
  void move_inputs(AttentionInputs& inputs) const;

  CaseTensors& host_;
};

}  // namespace fovea::harness
