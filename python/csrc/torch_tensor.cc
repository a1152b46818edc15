#include "torch_tensor.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <stdexcept>
#include <string>

// Part of torch's stable C interface, but only in builds of torch with CUDA: absent from the
// others.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(
    int32_t device_index, void** stream);

namespace fovea::torch_ops {
namespace {

using torch::headeronly::ScalarType;

// Of a thread, between its calls: a layer's pass takes tens of megabytes, and the system clears
// every page of memory that is new.
constexpr size_t kMostSpare = size_t{64} << 20;
thread_local HostMemory spare_memory;

std::optional<DType> dtype_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return DType::kF32;
    case ScalarType::Half: return DType::kF16;
    case ScalarType::BFloat16: return DType::kBf16;
    case ScalarType::Double: return DType::kF64;
    case ScalarType::Bool: return DType::kBool;
    case ScalarType::Int: return DType::kI32;
    default: return std::nullopt;
  }
}

int32_t torch_dtype(DType dtype) {
  switch (dtype) {
    case DType::kF32: return aoti_torch_dtype_float32();
    case DType::kF16: return aoti_torch_dtype_float16();
    case DType::kBf16: return aoti_torch_dtype_bfloat16();
    case DType::kF64: return aoti_torch_dtype_float64();
    case DType::kBool: return aoti_torch_dtype_bool();
    case DType::kI32: return aoti_torch_dtype_int32();
  }
  throw std::runtime_error("fovea: a dtype that torch has no name for");
}

// A tensor of the view's sizes and strides. Not torch::stable::empty: that one looks aten::empty up
// by its name at every call.
Tensor allocate(const TensorView& view, int32_t dtype) {
  const bool on_gpu = view.device.type == DeviceType::kCuda;
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      view.rank, view.sizes.data(), view.strides.data(), dtype,
      on_gpu ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu(),
      on_gpu ? view.device.index : -1, &handle));
  return Tensor(handle);
}

}  // namespace

void make_view(const char* name, Viewed& of) {
  if (!of.tensor) return;
  const int64_t rank = of.tensor->dim();
  if (rank < 1 || rank > TensorView::kMaxRank) {
    throw std::runtime_error(std::string("fovea: ") + name + ".rank is " + std::to_string(rank) +
                             ", must be in 1.." + std::to_string(TensorView::kMaxRank));
  }
  const std::optional<DType> dtype = dtype_of(of.tensor->scalar_type());
  if (!dtype) {
    throw std::runtime_error(std::string("fovea: ") + name + ".dtype is " +
                             torch::headeronly::toString(of.tensor->scalar_type()) +
                             ", must be a float, bool or int32");
  }
  if (of.tensor->stride(rank - 1) != 1 && of.tensor->size(rank - 1) > 1) {
    of.tensor = torch::stable::contiguous(*of.tensor);
  }
  const Tensor& tensor = *of.tensor;
  of.view.dtype = *dtype;
  of.view.device = tensor.is_cuda() ? Device::cuda(tensor.get_device_index()) : Device::cpu();
  of.view.rank = static_cast<int>(rank);
  of.view.data = tensor.data_ptr();
  std::copy_n(tensor.sizes().data(), rank, of.view.sizes.begin());
  std::copy_n(tensor.strides().data(), rank, of.view.strides.begin());
  // torch leaves the stride of a dimension of one element to chance.
  of.view.strides[static_cast<size_t>(rank - 1)] = 1;
}

void make_view_of_copy(const char* name, Viewed& of) {
  of.tensor = torch::stable::contiguous(*of.tensor);
  make_view(name, of);
}

void swap_rows_and_heads(TensorView& view) {
  std::swap(view.sizes[1], view.sizes[2]);
  std::swap(view.strides[1], view.strides[2]);
}

Viewed empty(std::initializer_list<int64_t> sizes, DType dtype, Device device, Order order) {
  TensorView view;
  view.dtype = dtype;
  view.device = device;
  view.rank = static_cast<int>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), view.sizes.begin());
  return empty_like(view, order);
}

Viewed empty_like(const TensorView& like, Order order) {
  TensorView view = like;
  int64_t dense = 1;
  for (auto i = static_cast<size_t>(view.rank); i-- > 0;) {
    view.strides[i] = dense;
    dense *= std::max<int64_t>(view.sizes[i], 1);  // as torch counts an empty dimension
  }
  TensorView shown = view;
  if (order == Order::kHeadsFirst) swap_rows_and_heads(shown);
  Tensor tensor = allocate(shown, torch_dtype(view.dtype));
  view.data = tensor.data_ptr();
  return {std::move(tensor), view};
}

Tensor empty_bytes(int64_t bytes, Device device) {
  TensorView view;
  view.device = device;
  view.rank = 1;
  view.sizes[0] = bytes;
  view.strides[0] = 1;
  // torch aligns memory to 64 bytes on the CPU and to more on a GPU: kWorkspaceAlignment holds.
  return allocate(view, aoti_torch_dtype_uint8());
}

Scratch::Scratch(size_t bytes, Device device) {
  if (bytes == 0) return;
  if (device.type == DeviceType::kCpu) {
    std::swap(host_memory_, spare_memory);
    if (host_memory_.bytes() < bytes) {
      host_memory_ = {};  // before there is more
      Result<HostMemory> made = HostMemory::allocate(bytes);
      if (!made.ok()) throw std::runtime_error("fovea: " + made.status().message());
      host_memory_ = std::move(*made);
    }
    workspace_ = {host_memory_.data(), bytes};
    return;
  }
  memory_ = empty_bytes(static_cast<int64_t>(bytes), device);
  workspace_ = {memory_->data_ptr(), bytes};
}

Scratch::~Scratch() {
  const size_t bytes = host_memory_.bytes();
  if (bytes <= kMostSpare && bytes > spare_memory.bytes()) std::swap(host_memory_, spare_memory);
}

Stream current_stream(Device device) {
  Stream stream;
  if (device.type != DeviceType::kCuda) return stream;
  if (aoti_torch_get_current_cuda_stream == nullptr) {
    throw std::runtime_error("fovea: this torch was built without CUDA");
  }
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device.index, &stream.handle));
  return stream;
}

int thread_count() {
  uint32_t threads = 0;
  TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
  return static_cast<int>(threads);
}

DropoutSeed read_dropout_seed(const std::optional<Tensor>& words, double dropout) {
  if (dropout == 0) return {};
  if (!words || !words->is_cpu() || words->numel() != 2 ||
      words->scalar_type() != ScalarType::Long || !words->is_contiguous()) {
    throw std::runtime_error(
        "fovea: dropout_seed must be [2] int64 on the CPU where dropout is not 0");
  }
  const auto* at = static_cast<const int64_t*>(words->data_ptr());
  return {static_cast<uint64_t>(at[0]), static_cast<uint64_t>(at[1])};
}

void raise_unless_ok(const Status& status) {
  if (!status.ok()) throw std::runtime_error("fovea: " + status.message());
}

}  // namespace fovea::torch_ops
