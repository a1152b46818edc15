// Lookup by everything a plan was made from.
#include "plan/cache.h"

namespace fovea {
namespace {

bool made_from(const Plan::Impl& plan, const AttentionProblem& problem, const DeviceInfo& device,
               std::string_view asked) {
  return plan.problem == problem && plan.device == device && plan.asked == asked;
}

}  // namespace

PlanCache::Entry PlanCache::find(const AttentionProblem& problem, const DeviceInfo& device,
                                 std::string_view asked) {
  const std::lock_guard lock(mutex_);
  for (const Entry& entry : entries_) {
    if (entry != nullptr && made_from(*entry, problem, device, asked)) return entry;
  }
  return nullptr;
}

void PlanCache::insert(Entry plan) {
  const std::lock_guard lock(mutex_);
  entries_[next_].swap(plan);  // the old plan is freed after the lock, with the argument
  next_ = (next_ + 1) % kEntries;
}

PlanCache& plan_cache() {
  static PlanCache* const cache = new PlanCache;
  return *cache;
}

}  // namespace fovea
