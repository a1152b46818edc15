// A pool of waiting threads and one job at a time.
#include "prim/cpu/thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace fovea {
namespace {

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
      busy_ = wanted_;
      ++job_;
    }
    wake_.notify_all();
    work(0);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return busy_ == 0; });
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
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return job_ != seen && worker <= wanted_; });
        seen = job_;
      }
      work(worker);
      const std::lock_guard<std::mutex> lock(mutex_);
      if (--busy_ == 0) done_.notify_one();
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
  int wanted_ = 0;   // workers 1..wanted_ take part in the current job
  int busy_ = 0;     // of those, how many have not finished it
  int started_ = 0;  // guarded by turn_
  uint64_t job_ = 0;
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
