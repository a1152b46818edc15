// A pool of waiting threads and one job at a time.
//
// A layer is a dozen jobs, one after another, and to wake a thread that sleeps takes as long as a
// small one of them. So whoever waits looks out for a while before it goes to sleep; it lets others
// have the CPU meanwhile if they want it.
#include "prim/cpu/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace fovea {
namespace {

constexpr int kLooks = 200;  // at once; then others may run between them
constexpr std::chrono::microseconds kLookout{1000};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Until there() or a while has passed.
template <typename There>
void look_out(There there) {
  for (int n = 0; n < kLooks; ++n) {
    if (there()) return;
    pause();
  }
  const auto end = std::chrono::steady_clock::now() + kLookout;
  while (!there() && std::chrono::steady_clock::now() < end) sched_yield();
}

class Pool {
 public:
  void run(int64_t items, int threads, ParallelBody body, void* context) {
    const int helpers = static_cast<int>(std::min<int64_t>(threads, items)) - 1;
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (helpers <= 0 || !turn.owns_lock()) {
      for (int64_t item = 0; item < items; ++item) body(context, item, 0);
      return;
    }
    start_threads(helpers);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      body_ = body;
      context_ = context;
      items_ = items;
      next_.store(0, std::memory_order_relaxed);
      wanted_ = std::min(helpers, started_);
      job_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    work(0);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      wanted_ = 0;  // nobody waits for those who have not come yet
    }
    const auto done = [&] { return busy_.load(std::memory_order_acquire) == 0; };
    look_out(done);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, done);
  }

 private:
  // A thread that cannot be started is done without: the caller always works.
  void start_threads(int count) {
    while (started_ < count) {
      try {
        std::thread([this, worker = started_ + 1] { serve(worker); }).detach();
      } catch (const std::system_error&) {
        return;
      }
      ++started_;
    }
  }

  void serve(int worker) {
    uint64_t seen = 0;
    const auto is_new = [&] { return job_.load(std::memory_order_acquire) != seen; };
    for (;;) {
      look_out(is_new);
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, is_new);
        seen = job_.load(std::memory_order_relaxed);
        if (worker > wanted_) continue;
        busy_.fetch_add(1, std::memory_order_relaxed);
      }
      work(worker);
      if (busy_.fetch_sub(1, std::memory_order_acq_rel) > 1) continue;
      const std::lock_guard<std::mutex> lock(mutex_);  // or it might go to sleep just now
      done_.notify_one();
    }
  }

  void work(int worker) {
    for (int64_t item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < items_;) {
      body_(context_, item, worker);
    }
  }

  std::mutex turn_;  // held by the call whose job this is
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  ParallelBody body_ = nullptr;
  void* context_ = nullptr;
  int64_t items_ = 0;
  std::atomic<int64_t> next_{0};
  int wanted_ = 0;            // workers 1..wanted_ may begin with the current job
  std::atomic<int> busy_{0};  // those who have begun and not finished
  int started_ = 0;           // guarded by turn_
  std::atomic<uint64_t> job_{0};
};

Pool* current_pool = nullptr;

// Never destroyed: its threads may outlive main. A child of fork has none of them and gets a new
// pool.
Pool& pool() {
  static const bool once = [] {
    current_pool = new Pool;
    pthread_atfork(nullptr, nullptr, [] { current_pool = new Pool; });
    return true;
  }();
  static_cast<void>(once);
  return *current_pool;
}

}  // namespace

void parallel_for(int64_t items, int threads, ParallelBody body, void* context) {
  pool().run(items, threads, body, context);
}

}  // namespace fovea
