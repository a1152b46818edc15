// The last plans made, so that a caller who asks for a plan at every call pays for one lookup.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <string_view>

#include "plan/build.h"

namespace fovea {

// Safe to use from many threads. Holds kEntries plans and forgets the oldest first: a model has a
// handful of problems, and a linear search over them is cheaper than hashing one.
class PlanCache {
 public:
  static constexpr size_t kEntries = 32;
  using Entry = std::shared_ptr<const Plan::Impl>;

  Entry find(const AttentionProblem& problem, const DeviceInfo& device, std::string_view asked);
  void insert(Entry plan);

 private:
  std::mutex mutex_;
  std::array<Entry, kEntries> entries_;
  size_t next_ = 0;
};

// The one of this process. Never destroyed, so plans may be made while others are torn down.
PlanCache& plan_cache();

}  // namespace fovea
