// The kernels of torch.ops.fovea, boxed: arguments are read from torch's stack, results put there.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>

namespace fovea::torch_ops {

void attention(StableIValue* stack, uint64_t arguments, uint64_t results);
void attention_no_grad(StableIValue* stack, uint64_t arguments, uint64_t results);
void attention_backward(StableIValue* stack, uint64_t arguments, uint64_t results);
void flash_for_cpu(StableIValue* stack, uint64_t arguments, uint64_t results);
void flash_for_cpu_backward(StableIValue* stack, uint64_t arguments, uint64_t results);
void layer(StableIValue* stack, uint64_t arguments, uint64_t results);
void layer_backward(StableIValue* stack, uint64_t arguments, uint64_t results);
void layer_cached(StableIValue* stack, uint64_t arguments, uint64_t results);
void layer_saved_bytes(StableIValue* stack, uint64_t arguments, uint64_t results);
void merge(StableIValue* stack, uint64_t arguments, uint64_t results);
void overrideable(StableIValue* stack, uint64_t arguments, uint64_t results);
void overrideable_backward(StableIValue* stack, uint64_t arguments, uint64_t results);
void version(StableIValue* stack, uint64_t arguments, uint64_t results);

}  // namespace fovea::torch_ops
