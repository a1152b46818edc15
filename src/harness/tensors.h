// The tensors of a case: memory that is aligned, filled from the seed, guarded by canaries.
//
//   CaseTensors tensors(c);
//   OwnedWorkspace workspace(plan.workspace_bytes(Pass::kForward));
//   Status done = plan.forward(tensors.forward(), workspace.view());
//   bool clean = tensors.canaries_intact() && tensors.inputs_unchanged();
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <vector>

#include "fovea/host_memory.h"
#include "harness/case.h"

namespace fovea::harness {

inline constexpr int kPoisonByte = 0xFF;  // all ones is a NaN in every float type

// What the guards of a buffer lie in: memory as anybody's tensors have it, or a workspace's.
enum class MemoryKind { kTensor, kWorkspace };

// A 64-byte aligned block between two guard lines whose bytes nobody may touch.
class GuardedBuffer {
 public:
  GuardedBuffer() = default;
  explicit GuardedBuffer(size_t bytes, MemoryKind kind = MemoryKind::kTensor);

  std::byte* data() const { return block_ ? block_.get() + kGuardBytes : nullptr; }
  size_t bytes() const { return bytes_; }
  bool canaries_intact() const;

  // The guards and what lies between them, for copies of the whole.
  std::byte* block() const { return block_.get(); }
  size_t block_bytes() const;

  static constexpr size_t kGuardBytes = 256;  // so that copies on a GPU are aligned as usual there
  static constexpr std::byte kCanary{0xA5};

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::unique_ptr<std::byte, Free> block_;
  size_t bytes_ = 0;
};

// Scratch for one call at a time, filled with NaN bytes: reading it before writing shows.
class OwnedWorkspace {
 public:
  explicit OwnedWorkspace(size_t bytes);

  Workspace view() const { return {buffer_.data(), buffer_.bytes()}; }
  void poison() { fill(kPoisonByte); }
  void fill(int byte);
  bool canaries_intact() const { return buffer_.canaries_intact(); }

 private:
  GuardedBuffer buffer_;
};

// Inputs and outputs of both passes. The backward pass reads out and lse where forward wrote them.
// Views may be edited by a test; the buffers behind them stay.
class CaseTensors {
 public:
  explicit CaseTensors(const Case& c);

  const ForwardTensors& forward() const { return forward_; }
  const BackwardTensors& backward() const { return backward_; }
  ForwardTensors& forward() { return forward_; }
  BackwardTensors& backward() { return backward_; }

  void poison_outputs();          // NaN into out and lse, and into every gradient
  void poison_gradients();        // into the gradients alone: out and lse feed backward
  bool canaries_intact() const;   // guards of every tensor, and row padding of every output
  bool inputs_unchanged() const;  // the bytes of every input, since filling or accept_inputs
  void accept_inputs();           // takes the inputs as they are now, after a test edited them
  size_t bytes() const;           // of all tensors together
  std::vector<const GuardedBuffer*> buffers() const;

 private:
  enum class Role { kInput, kOutput, kGradient };

  struct Owned {
    GuardedBuffer buffer;
    TensorView view;
    Role role = Role::kInput;
    uint64_t hash = 0;  // of an input's bytes
  };

  TensorView add(DType dtype, const TensorView& shape, size_t elements, Role role);
  TensorView add_plain(DType dtype, std::initializer_list<int64_t> sizes, Role role);
  TensorView add_rows(int64_t rows, int64_t heads, int64_t dim, Role role);
  void add_features();
  void add_outputs();
  void add_gradients();

  Case case_;
  DType wide_;  // of lse, slopes and sink: f32, or f64 for an f64 problem
  std::vector<Owned> owned_;
  ForwardTensors forward_;
  BackwardTensors backward_;
};

// The elements of a contiguous tensor as one row.
TensorView flat(const TensorView& t);

// Every element of a view, whatever its strides and dtype: for tests and comparisons, not speed.
double read_element(const TensorView& t, int64_t i0, int64_t i1 = 0, int64_t i2 = 0,
                    int64_t i3 = 0);
void write_element(const TensorView& t, double value, int64_t i0, int64_t i1 = 0, int64_t i2 = 0,
                   int64_t i3 = 0);

}  // namespace fovea::harness
