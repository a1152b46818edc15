// Where a layer's own tensors lie: planned once, turned into views by each call.
#pragma once

#include <array>
#include <initializer_list>
#include <vector>

#include "fovea/layer_plan.h"
#include "layers/life.h"

namespace fovea::layers {

// The two workspaces, what outlives a pass, and results that are lent until they are written.
enum class Room { kForward, kBackward, kSaved, kOut, kDquery, kDprojection, kDconv, kDoutput };
inline constexpr size_t kRooms = 8;

// One tensor of a layer's own; never made: its id is negative.
struct Slot {
  int id = -1;
  TensorView view;  // its data is null

  bool made() const { return id >= 0; }
  size_t bytes() const { return static_cast<size_t>(view.elements() * dtype_bytes(view.dtype)); }
};

class MemoryPlan {
 public:
  using Sizes = std::initializer_list<int64_t>;

  explicit MemoryPlan(LayerUse use = LayerUse::kInference, Device device = Device::cpu())
      : use_(use), device_(device) {}

  Slot forward(DType dtype, Sizes sizes, Life life = {}) {
    return make(Room::kForward, dtype, sizes, life);
  }
  Slot backward(DType dtype, Sizes sizes, Life life = {}) {
    return training() ? make(Room::kBackward, dtype, sizes, life) : Slot{};
  }
  // Made by forward and read by backward, there last by a step; where there is none, it has a life
  // in forward alone.
  Slot saved(DType dtype, Sizes sizes, Life life = {}, int last_read = kAllSteps) {
    return training() ? make(Room::kSaved, dtype, sizes, {0, last_read})
                      : make(Room::kForward, dtype, sizes, life);
  }
  // Bytes without a type, for others to cut up.
  Slot forward_bytes(const Need& need) {
    return forward(DType::kBool, {static_cast<int64_t>(need.bytes)}, need.life);
  }
  Slot backward_bytes(const Need& need) {
    return backward(DType::kBool, {static_cast<int64_t>(need.bytes)}, need.life);
  }

  // The `bytes` of a result may hold what has lived by the time that step `until` writes it.
  void lend(Room room, int64_t bytes, int until) { lent_.push_back({room, bytes, until}); }

  // Finds a place for everything: after the last was made, and before the first call. What was
  // saved is spent: a place too, once it has been read for the last time.
  void place(bool spends_saved = false);

  size_t bytes(Room room) const { return static_cast<size_t>(bytes_[index(room)]); }

 private:
  friend struct Memory;
  struct Region {
    Room room;
    Life life;
    int64_t bytes;
    int64_t offset = -1;

    int64_t end() const { return offset + bytes; }
  };
  struct Lent {
    Room room;
    int64_t bytes;
    int until;
  };

  static size_t index(Room room) { return static_cast<size_t>(room); }
  bool training() const { return use_ == LayerUse::kTraining; }
  Slot make(Room room, DType dtype, Sizes sizes, Life life);
  int64_t lowest_gap(Room room, const Region& region) const;
  // One after another, each where it fits in what is lent, or else in the pass's own room; gives
  // what that must hold.
  int64_t put(const std::vector<Region*>& order, Room own);

  LayerUse use_;
  Device device_;
  std::vector<Region> regions_;  // by id
  std::vector<Lent> lent_;
  std::array<int64_t, kRooms> bytes_{};
};

// The memory of one call; rooms that it has none of give views without data.
struct Memory {
  const MemoryPlan* plan = nullptr;
  std::array<std::byte*, kRooms> rooms{};

  void set(Room room, const void* data) {
    rooms[MemoryPlan::index(room)] = static_cast<std::byte*>(const_cast<void*>(data));
  }
  // The same with a result of the call.
  Memory with(Room room, const TensorView& result) const {
    Memory more = *this;
    more.set(room, result.data);
    return more;
  }
  TensorView at(const Slot& slot) const;
  Scratch scratch_at(const Slot& slot) const {
    return {static_cast<std::byte*>(at(slot).data), slot.made() ? slot.bytes() : 0};
  }
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
