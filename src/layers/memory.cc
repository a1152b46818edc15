// Offsets of planned tensors, and views of parts.
#include "layers/memory.h"

#include <algorithm>

#include "base/ceil_div.h"

namespace fovea::layers {

Slot MemoryPlan::make(Room room, DType dtype, std::initializer_list<int64_t> sizes) {
  constexpr int64_t kAlign = kWorkspaceAlignment;
  Slot slot;
  slot.room = room;
  slot.view = TensorView::contiguous(nullptr, dtype, sizes, device_);
  int64_t& next = next_[index(room)];
  slot.offset = next;
  next += ceil_div(slot.view.elements() * dtype_bytes(dtype), kAlign) * kAlign;
  bytes_[index(room)] = std::max(bytes_[index(room)], next);
  return slot;
}

TensorView Memory::at(const Slot& slot) const {
  TensorView view = slot.view;
  std::byte* const room = slot.room == Room::kForward    ? forward
                          : slot.room == Room::kBackward ? backward
                                                         : saved;
  view.data = room == nullptr || !slot.made() ? nullptr : room + slot.offset;
  return view;
}

namespace {

TensorView part(const TensorView& t, int dim, int64_t first, int64_t count) {
  TensorView view = t;
  const auto at = static_cast<size_t>(dim);
  view.data = static_cast<std::byte*>(t.data) + first * t.strides[at] * dtype_bytes(t.dtype);
  view.sizes[at] = count;
  return view;
}

}  // namespace

TensorView columns(const TensorView& t, int64_t first, int64_t count) {
  return part(t, t.rank - 1, first, count);
}
TensorView rows(const TensorView& t, int64_t first, int64_t count) {
  return part(t, 1, first, count);
}
TensorView weight_rows(const TensorView& t, int64_t first, int64_t count) {
  return part(t, 0, first, count);
}

TensorView as_heads(const TensorView& t, int64_t heads) {
  const int64_t dim = t.sizes[2] / heads;
  TensorView view = t;
  view.rank = 4;
  view.sizes = {t.sizes[0], t.sizes[1], heads, dim};
  view.strides = {t.strides[0], t.strides[1], dim, 1};
  return view;
}

TensorView as_rows(const TensorView& t) {
  TensorView view = t;
  view.rank = 3;
  view.sizes = {t.sizes[0], t.sizes[1], t.sizes[2] * t.sizes[3], 0};
  view.strides = {t.strides[0], t.strides[1], 1, 0};
  return view;
}

}  // namespace fovea::layers
