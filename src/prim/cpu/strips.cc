#include "prim/cpu/strips.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <new>

#include "prim/cpu/thread_pool.h"

namespace fovea {
namespace {

struct alignas(kStripBytes) Strip {
  std::atomic<bool> taken{false};
  std::atomic<int64_t> next_piece{0}, pieces_done{0}, next_part{0};
};
static_assert(sizeof(Strip) == kStripBytes);

// Of the parts left, one of as many as there are threads, but of no more than this: who takes few
// is soon back.
constexpr int kMostShares = 4;

struct Range {
  int64_t begin = 0, end = 0;
};

// The next numbers below `end`, if any are left: a `share`th of those, but at most `most`.
Range take(std::atomic<int64_t>& next, int64_t end, int64_t share, int64_t most) {
  const int64_t left = end - next.load(std::memory_order_relaxed);
  if (left <= 0) return {};
  const int64_t count = std::clamp<int64_t>(left / share, 1, most);
  const int64_t begin = next.fetch_add(count, std::memory_order_relaxed);
  return {std::min(begin, end), std::min(begin + count, end)};
}

class Strips {
 public:
  Strips(Strip* all, int64_t count, int threads, const StripWork& work)
      : all_(all),
        count_(count),
        threads_(threads),
        share_(std::clamp(threads, 1, kMostShares)),
        work_(work) {}

  void work(int worker) const {
    const int64_t first = worker * count_ / threads_;
    for (int64_t n = 0; n < count_; ++n) {
      const int64_t strip = (first + n) % count_;
      std::atomic<bool>& taken = all_[strip].taken;
      if (taken.load(std::memory_order_relaxed)) continue;
      if (!taken.exchange(true, std::memory_order_relaxed)) go_on_with(strip, worker);
    }
    for (bool all_done = false; !all_done;) {
      all_done = true;
      for (int64_t n = 0; n < count_; ++n) all_done &= go_on_with((first + n) % count_, worker);
      if (!all_done) sched_yield();
    }
  }

 private:
  // Does what can be done, and says whether nothing is left: false while others prepare the strip.
  bool go_on_with(int64_t strip, int worker) const {
    Strip& s = all_[strip];
    const StripSize size = work_.size(work_.context, strip);
    for (Range r; (r = take(s.next_piece, size.pieces, 1, 1)).begin < r.end;) {
      work_.prepare(work_.context, strip, r.begin, worker);
      s.pieces_done.fetch_add(1, std::memory_order_release);
    }
    if (s.pieces_done.load(std::memory_order_acquire) < size.pieces) return false;
    for (Range r; (r = take(s.next_part, size.parts, share_, size.at_once)).begin < r.end;) {
      work_.parts(work_.context, strip, r.begin, r.end, worker);
    }
    return true;
  }

  Strip* const all_;
  const int64_t count_;
  const int threads_;
  const int share_;
  const StripWork& work_;
};

}  // namespace

void parallel_strips(int64_t strips, int threads, std::byte* memory, const StripWork& work) {
  if (strips == 0) return;
  auto* const all = reinterpret_cast<Strip*>(memory);
  for (int64_t n = 0; n < strips; ++n) new (all + n) Strip;
  const Strips run(all, strips, threads, work);
  parallel_for(threads, threads, [&](int64_t, int worker) { run.work(worker); });
}

}  // namespace fovea
