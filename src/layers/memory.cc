// Offsets of planned tensors, and views of parts.
#include "layers/memory.h"

#include <algorithm>

#include "base/ceil_div.h"

namespace fovea::layers {

namespace {

// Of saved tensors what a workspace has; of others more, for which cuBLASLt has faster kernels.
constexpr int64_t kSavedAlignment = kWorkspaceAlignment, kAlignment = 256;

bool is_forward(Room room) { return room == Room::kForward || room == Room::kOut; }

}  // namespace

Slot MemoryPlan::make(Room room, DType dtype, Sizes sizes, Life life) {
  Slot slot;
  slot.id = static_cast<int>(regions_.size());
  slot.view = TensorView::contiguous(nullptr, dtype, sizes, device_);
  const int64_t align = room == Room::kSaved ? kSavedAlignment : kAlignment;
  Region region{room, life, ceil_div(static_cast<int64_t>(slot.bytes()), align) * align};
  if (room == Room::kSaved) {  // the same for every plan of these sizes
    region.offset = bytes_[index(room)];
    bytes_[index(room)] = region.end();
  }
  regions_.push_back(region);
  return slot;
}

int64_t MemoryPlan::lowest_gap(Room room, const Region& region) const {
  std::vector<const Region*> taken;
  for (const Region& other : regions_) {
    if (other.offset >= 0 && other.room == room && other.life.meets(region.life)) {
      taken.push_back(&other);
    }
  }
  std::sort(taken.begin(), taken.end(),
            [](const Region* a, const Region* b) { return a->offset < b->offset; });
  int64_t at = 0;
  for (const Region* other : taken) {
    if (at + region.bytes <= other->offset) break;
    at = std::max(at, ceil_div(other->end(), kAlignment) * kAlignment);
  }
  return at;
}

int64_t MemoryPlan::put(const std::vector<Region*>& order, Room own) {
  for (Region* const region : order) region->offset = -1;
  int64_t bytes = 0;
  for (Region* const region : order) {
    region->room = own;
    for (const Lent& lent : lent_) {
      if (is_forward(lent.room) == is_forward(own) && region->life.last < lent.until &&
          lowest_gap(lent.room, *region) + region->bytes <= lent.bytes) {
        region->room = lent.room;
        break;
      }
    }
    region->offset = lowest_gap(region->room, *region);
    if (region->room == own) bytes = std::max(bytes, region->end());
  }
  return bytes;
}

// What is large comes first; after that, a few times, whatever reached furthest, and the best order
// is taken.
void MemoryPlan::place(bool spends_saved) {
  constexpr int kTries = 32;
  if (spends_saved) lend(Room::kSaved, bytes_[index(Room::kSaved)], kAllSteps);
  for (const Room own : {Room::kForward, Room::kBackward}) {
    std::vector<Region*> order;
    for (Region& region : regions_) {
      if (region.room == own) order.push_back(&region);
    }
    std::stable_sort(order.begin(), order.end(),
                     [](const Region* a, const Region* b) { return a->bytes > b->bytes; });
    std::vector<Region*> best = order;
    int64_t least = put(order, own);
    for (int n = 0; n < kTries && least > 0; ++n) {
      const auto furthest =
          std::max_element(order.begin(), order.end(), [&](const Region* a, const Region* b) {
            return (a->room == own ? a->end() : 0) < (b->room == own ? b->end() : 0);
          });
      std::rotate(order.begin(), furthest, furthest + 1);
      const int64_t bytes = put(order, own);
      if (bytes < least) least = bytes, best = order;
    }
    bytes_[index(own)] = put(best, own);
  }
}

TensorView Memory::at(const Slot& slot) const {
  TensorView view = slot.view;
  if (!slot.made() || plan == nullptr) return view;
  const MemoryPlan::Region& region = plan->regions_[static_cast<size_t>(slot.id)];
  std::byte* const room = rooms[MemoryPlan::index(region.room)];
  view.data = room == nullptr ? nullptr : room + region.offset;
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
