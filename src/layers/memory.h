// Where a layer's own tensors lie: offsets planned once, turned into views by each call.
#pragma once

#include <cstddef>
#include <initializer_list>

#include "fovea/layer_plan.h"

namespace fovea::layers {

enum class Room { kForward, kBackward, kSaved };  // the two workspaces, and what outlives a pass

// One tensor of a layer's own; never made: offset is negative.
struct Slot {
  Room room = Room::kForward;
  int64_t offset = -1;
  TensorView view;  // its data is null

  bool made() const { return offset >= 0; }
};

class MemoryPlan {
 public:
  explicit MemoryPlan(LayerUse use = LayerUse::kInference, Device device = Device::cpu())
      : use_(use), device_(device) {}

  Slot forward(DType dtype, std::initializer_list<int64_t> sizes) {
    return make(Room::kForward, dtype, sizes);
  }
  Slot backward(DType dtype, std::initializer_list<int64_t> sizes) {
    return use_ == LayerUse::kTraining ? make(Room::kBackward, dtype, sizes) : Slot{};
  }
  // Made by forward and read by backward, where there is one.
  Slot saved(DType dtype, std::initializer_list<int64_t> sizes) {
    return make(use_ == LayerUse::kTraining ? Room::kSaved : Room::kForward, dtype, sizes);
  }
  // Bytes without a type, for others to cut up.
  Slot forward_bytes(size_t bytes) { return forward(DType::kBool, {static_cast<int64_t>(bytes)}); }
  Slot backward_bytes(size_t bytes) {
    return backward(DType::kBool, {static_cast<int64_t>(bytes)});
  }

  // Tensors of one step may lie over those of an earlier one: what is made after again_from(mark)
  // takes the place of what was made since the mark, whose use ends before its own begins.
  int64_t mark(Room room) const { return next_[index(room)]; }
  void again_from(Room room, int64_t mark) { next_[index(room)] = mark; }

  size_t bytes(Room room) const { return static_cast<size_t>(bytes_[index(room)]); }

 private:
  static size_t index(Room room) { return static_cast<size_t>(room); }
  Slot make(Room room, DType dtype, std::initializer_list<int64_t> sizes);

  LayerUse use_;
  Device device_;
  int64_t next_[3] = {0, 0, 0};
  int64_t bytes_[3] = {0, 0, 0};  // the furthest that next_ has been
};

// The memory of one call; rooms that it has none of give views without data.
struct Memory {
  std::byte* forward = nullptr;
  std::byte* backward = nullptr;
  std::byte* saved = nullptr;

  TensorView at(const Slot& slot) const;
  std::byte* bytes_at(const Slot& slot) const { return static_cast<std::byte*>(at(slot).data); }
};

// Parts of views. Columns [first, first + count) of the last dimension:
TensorView columns(const TensorView& t, int64_t first, int64_t count);
// Rows [first, first + count) of dimension 1, or of dimension 0 of a weight.
TensorView rows(const TensorView& t, int64_t first, int64_t count);
TensorView weight_rows(const TensorView& t, int64_t first, int64_t count);
// [batch, rows, heads * dim] as [batch, rows, heads, dim], and back.
TensorView as_heads(const TensorView& t, int64_t heads);
TensorView as_rows(const TensorView& t);

}  // namespace fovea::layers
