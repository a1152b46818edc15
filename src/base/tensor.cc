// Names of dtypes, and views made from sizes.
#include "fovea/tensor.h"

#include <limits>

#include "base/checked.h"

namespace fovea {

namespace {

// A view that every call refuses: its rank is none that a tensor can have.
TensorView refused_view(void* data, DType dtype, Device device) {
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  view.device = device;
  view.rank = -1;
  return view;
}

}  // namespace

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "f32";
    case DType::kF16: return "f16";
    case DType::kBf16: return "bf16";
    case DType::kF64: return "f64";
    case DType::kBool: return "bool";
    case DType::kI32: return "i32";
  }
  return "unknown";
}

TensorView TensorView::contiguous(void* data, DType dtype, std::initializer_list<int64_t> sizes,
                                  Device device) {
  if (sizes.size() > kMaxRank) return refused_view(data, dtype, device);
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  view.device = device;
  view.rank = static_cast<int>(sizes.size());
  size_t at = 0;
  for (const int64_t size : sizes) view.sizes[at++] = size;
  int64_t dense = 1;
  while (at-- > 0) {
    view.strides[at] = dense;
    // A product that does not fit stays at the largest stride, which the checks of a call refuse.
    dense = checked_mul(dense, view.sizes[at]).value_or(std::numeric_limits<int64_t>::max());
  }
  return view;
}

TensorView TensorView::strided(void* data, DType dtype, std::initializer_list<int64_t> sizes,
                               std::initializer_list<int64_t> strides, Device device) {
  if (sizes.size() > kMaxRank || sizes.size() != strides.size()) {
    return refused_view(data, dtype, device);
  }
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  view.device = device;
  view.rank = static_cast<int>(sizes.size());
  size_t at = 0;
  for (const int64_t size : sizes) view.sizes[at++] = size;
  at = 0;
  for (const int64_t stride : strides) view.strides[at++] = stride;
  return view;
}

}  // namespace fovea
