// Copies between the tensors of a case and a CUDA device.
#include "harness/device_tensors.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <string>

namespace fovea::harness {
namespace {

Status status_of(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();  // told here, so not once more by the next call
  const StatusCode code =
      error == cudaErrorMemoryAllocation ? StatusCode::kOutOfMemory : StatusCode::kInternal;
  return {code, std::string(call) + ": " + cudaGetErrorString(error)};
}

Status use(int index) { return status_of(cudaSetDevice(index), "cudaSetDevice"); }

}  // namespace

Status wait_for_device(int index) {
  if (Status s = use(index); !s.ok()) return s;
  // A launch that was refused is no work to wait for: its error waits elsewhere.
  if (Status s = status_of(cudaGetLastError(), "cudaGetLastError"); !s.ok()) return s;
  return status_of(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

void DeviceBlock::Free::operator()(std::byte* p) const { (void)cudaFree(p); }

Status DeviceBlock::reserve(size_t bytes, int index) {
  if (block_ != nullptr) return {};
  if (Status s = use(index); !s.ok()) return s;
  void* memory = nullptr;
  if (Status s = status_of(cudaMalloc(&memory, bytes), "cudaMalloc"); !s.ok()) return s;
  block_.reset(static_cast<std::byte*>(memory));
  return {};
}

Status DeviceWorkspace::fill(int byte) {
  constexpr size_t kGuards = 2 * GuardedBuffer::kGuardBytes;
  if (Status s = block_.reserve(bytes_ + kGuards, index_); !s.ok()) return s;
  if (Status s = use(index_); !s.ok()) return s;
  const int canary = static_cast<int>(GuardedBuffer::kCanary);
  Status s = status_of(cudaMemset(block_.data(), canary, bytes_ + kGuards), "cudaMemset");
  if (s.ok() && bytes_ > 0) {
    s = status_of(cudaMemset(view().data, byte, bytes_), "cudaMemset");
  }
  return s.ok() ? wait_for_device(index_) : s;
}

Result<bool> DeviceWorkspace::canaries_intact() const {
  constexpr size_t kGuard = GuardedBuffer::kGuardBytes;
  std::array<std::byte, 2 * kGuard> guards{};
  const auto read = [&](std::byte* to, size_t at) {
    return status_of(cudaMemcpy(to, block_.data() + at, kGuard, cudaMemcpyDeviceToHost),
                     "cudaMemcpy");
  };
  if (Status s = use(index_); !s.ok()) return s;
  if (Status s = read(guards.data(), 0); !s.ok()) return s;
  if (Status s = read(guards.data() + kGuard, kGuard + bytes_); !s.ok()) return s;
  return std::all_of(guards.begin(), guards.end(),
                     [](std::byte b) { return b == GuardedBuffer::kCanary; });
}

DeviceCopies::DeviceCopies(const std::vector<const GuardedBuffer*>& buffers, int index)
    : index_(index) {
  for (const GuardedBuffer* buffer : buffers) {
    copies_.emplace_back();
    copies_.back().host = buffer;
  }
}

Status DeviceCopies::upload() {
  if (Status s = use(index_); !s.ok()) return s;
  for (Copy& copy : copies_) {
    const size_t bytes = copy.host->block_bytes();
    if (Status s = copy.block.reserve(bytes, index_); !s.ok()) return s;
    Status s =
        status_of(cudaMemcpy(copy.block.data(), copy.host->block(), bytes, cudaMemcpyHostToDevice),
                  "cudaMemcpy");
    if (!s.ok()) return s;
  }
  return wait_for_device(index_);
}

Status DeviceCopies::download() {
  if (Status s = wait_for_device(index_); !s.ok()) return s;
  for (const Copy& copy : copies_) {
    Status s = status_of(cudaMemcpy(copy.host->block(), copy.block.data(), copy.host->block_bytes(),
                                    cudaMemcpyDeviceToHost),
                         "cudaMemcpy");
    if (!s.ok()) return s;
  }
  return {};
}

// Views are found by where they point: a test may have edited their sizes and strides.
TensorView DeviceCopies::there(const TensorView& here) const {
  if (!here.given()) return here;
  TensorView view = here;
  view.device = Device::cuda(index_);
  view.data = nullptr;
  const auto* at = static_cast<const std::byte*>(here.data);
  for (const Copy& copy : copies_) {
    const std::byte* first = copy.host->block();
    if (at < first || at >= first + copy.host->block_bytes()) continue;
    view.data = copy.block.data() + (at - first);
  }
  return view;
}

void DeviceTensors::move_inputs(AttentionInputs& in) const {
  for (TensorView* view : {&in.q, &in.k, &in.v, &in.bias, &in.mask, &in.key_lengths,
                           &in.alibi_slopes, &in.sink, &in.cu_seqlens_q, &in.cu_seqlens_kv}) {
    *view = there(*view);
  }
}

ForwardTensors DeviceTensors::forward() const {
  ForwardTensors t = host_.forward();
  move_inputs(t);
  for (TensorView* view : {&t.out, &t.lse}) *view = there(*view);
  return t;
}

BackwardTensors DeviceTensors::backward() const {
  BackwardTensors t = host_.backward();
  move_inputs(t);
  for (TensorView* view :
       {&t.out, &t.lse, &t.dout, &t.dlse, &t.dq, &t.dk, &t.dv, &t.dbias, &t.dsink}) {
    *view = there(*view);
  }
  return t;
}

}  // namespace fovea::harness
