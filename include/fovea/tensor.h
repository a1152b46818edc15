// A view of memory that the caller owns: pointer, element type, sizes and strides in elements, as
// in DLPack. Copying a view copies no data.
//
//   std::vector<float> data(2 * 128 * 8 * 64);
//   auto q = fovea::TensorView::contiguous(data.data(), fovea::DType::kF32, {2, 128, 8, 64});
//   auto bshd = fovea::TensorView::strided(ptr, fovea::DType::kBf16, {b, s, h, d}, {h*s*d, d, s*d,
//   1}); auto from_torch = fovea::TensorView::from_dlpack(dlm->dl_tensor);
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "fovea/device.h"

namespace fovea {

enum class DType { kF32, kF16, kBf16, kF64, kBool, kI32 };

constexpr int64_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kF64: return 8;
    case DType::kF32:
    case DType::kI32: return 4;
    case DType::kF16:
    case DType::kBf16: return 2;
    case DType::kBool: return 1;
  }
  return 0;
}

const char* dtype_name(DType dtype);  // "f32", "f16", "bf16", "f64", "bool", "i32"

struct TensorView {
  static constexpr int kMaxRank = 4;

  void* data = nullptr;  // a view with rank 0 and no data is "not given"
  DType dtype = DType::kF32;
  Device device;
  int rank = 0;
  std::array<int64_t, kMaxRank> sizes{};
  std::array<int64_t, kMaxRank> strides{};  // in elements

  static TensorView contiguous(void* data, DType dtype, std::initializer_list<int64_t> sizes,
                               Device device = Device::cpu());
  static TensorView strided(void* data, DType dtype, std::initializer_list<int64_t> sizes,
                            std::initializer_list<int64_t> strides, Device device = Device::cpu());

  // Any struct with DLPack's DLTensor members, so that this header needs no other library's. A
  // type, device or rank that fovea has no name for gives a view with rank -1, which every call
  // refuses.
  template <typename DLTensorLike>
  static TensorView from_dlpack(const DLTensorLike& t);

  bool given() const { return rank != 0 || data != nullptr; }
  int64_t elements() const {
    int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= sizes[static_cast<size_t>(i)];
    return n;
  }
};

template <typename DLTensorLike>
TensorView TensorView::from_dlpack(const DLTensorLike& t) {
  TensorView view;
  const TensorView refused = [] {
    TensorView r;
    r.rank = -1;
    return r;
  }();
  const int code = t.dtype.code, bits = t.dtype.bits;
  if (t.dtype.lanes != 1 || t.ndim < 1 || t.ndim > kMaxRank) return refused;
  if (code == 2 && bits == 64)
    view.dtype = DType::kF64;
  else if (code == 2 && bits == 32)
    view.dtype = DType::kF32;
  else if (code == 2 && bits == 16)
    view.dtype = DType::kF16;
  else if (code == 4 && bits == 16)
    view.dtype = DType::kBf16;
  else if (code == 6 && bits == 8)
    view.dtype = DType::kBool;
  else if (code == 0 && bits == 32)
    view.dtype = DType::kI32;
  else
    return refused;
  if (static_cast<int>(t.device.device_type) == 1)
    view.device = Device::cpu();
  else if (static_cast<int>(t.device.device_type) == 2)
    view.device = Device::cuda(t.device.device_id);
  else
    return refused;
  view.data = static_cast<char*>(t.data) + t.byte_offset;
  view.rank = t.ndim;
  int64_t dense = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    const auto at = static_cast<size_t>(i);
    view.sizes[at] = t.shape[i];
    view.strides[at] = t.strides != nullptr ? t.strides[i] : dense;
    dense *= t.shape[i];
  }
  return view;
}

}  // namespace fovea
