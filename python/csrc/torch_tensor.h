// torch's tensors as the library sees them: views, new tensors, the current stream, errors. Only
// the stable ABI of torch is used, so that one binary serves every torch since 2.11.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <utility>

#include "fovea/fovea.h"

namespace fovea::torch_ops {

using torch::stable::Tensor;

// Reads the arguments of a boxed op one after the other. Reading takes an argument over from torch:
// each is read exactly once, and all of them before anything can throw, or those left would never
// be freed.
class Arguments {
 public:
  explicit Arguments(StableIValue* stack) : next_(stack) {}
  template <typename T>
  T take() {
    return torch::stable::detail::to<T>(*next_++);
  }

 private:
  StableIValue* next_;
};

// Puts an op's results where its arguments were.
template <typename... Results>
void give_back(StableIValue* stack, const Results&... results) {
  ((*stack++ = torch::stable::detail::from(results)), ...);
}

// A tensor and the library's view of it. One that is not given has a view that is not given.
struct Viewed {
  std::optional<Tensor> tensor;
  TensorView view;
};

// Makes the view of a tensor that was read. Its last stride is 1: where torch's is not, the tensor
// becomes a copy.
void make_view(const char* name, Viewed& of);

// The same of a copy, whose elements follow each other.
void make_view_of_copy(const char* name, Viewed& of);

// How a tensor of rows and heads is shown to torch; its view is [batch, row, head, dim] either way.
enum class Order { kRowsFirst, kHeadsFirst };

// The view of a tensor [batch, head, row, dim] as [batch, row, head, dim].
void swap_rows_and_heads(TensorView& view);

// A new tensor, not initialised, dense in the order of its view.
Viewed empty(std::initializer_list<int64_t> sizes, DType dtype, Device device,
             Order order = Order::kRowsFirst);
Viewed empty_like(const TensorView& view, Order order = Order::kRowsFirst);

// New memory without a type.
Tensor empty_bytes(int64_t bytes, Device device);

// Scratch memory of one call. torch gives that of a GPU back to the stream it was used on; that of
// the CPU stays with the thread, for its next call.
class Scratch {
 public:
  Scratch(size_t bytes, Device device);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  Workspace workspace() const { return workspace_; }

 private:
  std::optional<Tensor> memory_;
  HostMemory host_memory_;
  Workspace workspace_;
};

// The stream that torch queues work on now.
Stream current_stream(Device device);

// Threads that torch gives to one operation on the CPU.
int thread_count();

// The seed of a call that drops weights: [2] int64 on the CPU, seed and offset. Not read where
// dropout is 0.
DropoutSeed read_dropout_seed(const std::optional<Tensor>& words, double dropout);

// Throws what torch turns into a RuntimeError.
void raise_unless_ok(const Status& status);

}  // namespace fovea::torch_ops
