// A pool of waiting threads and one job at a time.
//
// A layer is a dozen jobs, one after another, and to wake a thread that sleeps takes as long as a
// small one of them. So whoever waits looks out for a while before it goes to sleep; it lets others
// have the CPU meanwhile if they want it.
//
// A thread that is woken may find itself on the caller's CPU, with others idle, and then waits
// until the caller is done: on some virtual machines that is the rule. So threads that slept are
// kept off the caller's CPU.
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
#include <vector>

namespace fovea {
namespace {

constexpr int kLooks = 200;  // at once; then others may run between them
constexpr std::chrono::microseconds kLookout{1000};
constexpr size_t kLine = 64;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Until there() or a while has passed: whether it is there.
template <typename There>
bool look_out(There there) {
  for (int n = 0; n < kLooks; ++n) {
    if (there()) return true;
    pause();
  }
  const auto end = std::chrono::steady_clock::now() + kLookout;
  while (!there()) {
    if (std::chrono::steady_clock::now() >= end) return false;
    sched_yield();
  }
  return true;
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
    body_ = body;
    context_ = context;
    items_ = items;
    next_.store(0, std::memory_order_relaxed);
    wanted_ = std::min(helpers, started_);
    job_.fetch_add(1);  // opens it
    if (asleep_.load() > 0) {
      keep_off(sched_getcpu());
      const std::lock_guard<std::mutex> lock(mutex_);  // or one might be about to sleep just now
      wake_.notify_all();
    }
    work(0);
    job_.fetch_add(1);  // closes it: nobody waits for those who have not come yet
    const auto done = [&] { return busy_.load() == 0; };
    if (look_out(done)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, done);
  }

 private:
  // A thread that cannot be started is done without: the caller always works.
  void start_threads(int count) {
    handles_.reserve(static_cast<size_t>(count));  // not between a thread's start and its release
    while (started_ < count) {
      try {
        std::thread thread([this, worker = started_ + 1] { serve(worker); });
        handles_.push_back(thread.native_handle());
        thread.detach();
      } catch (const std::system_error&) {
        return;
      }
      ++started_;
      kept_off_ = -1;
    }
  }

  // Lets threads run on every CPU that they may use but this one, if there are others.
  void keep_off(int cpu) {
    if (cpu == kept_off_) return;
    kept_off_ = cpu;
    cpu_set_t now;
    if (cpu < 0 || pthread_getaffinity_np(handles_[0], sizeof now, &now) != 0) return;
    if (!CPU_EQUAL(&now, &given_)) allowed_ = now;  // as inherited, or as somebody has changed it
    given_ = allowed_;
    if (CPU_COUNT(&given_) > 1) CPU_CLR(static_cast<size_t>(cpu), &given_);
    for (const pthread_t thread : handles_) pthread_setaffinity_np(thread, sizeof given_, &given_);
  }

  void serve(int worker) {
    uint64_t seen = 0;
    const auto is_new = [&] {
      const uint64_t job = job_.load();
      return is_open(job) && job != seen;
    };
    for (;;) {
      if (!look_out(is_new)) {
        std::unique_lock<std::mutex> lock(mutex_);
        ++asleep_;
        wake_.wait(lock, is_new);
        --asleep_;
      }
      // First counted, then looked: a job that is open now stays as it is until it is done here.
      ++busy_;
      const uint64_t job = job_.load();
      if (is_open(job)) {
        seen = job;
        if (worker <= wanted_) work(worker);
      }
      if (--busy_ > 0) continue;
      const std::lock_guard<std::mutex> lock(mutex_);  // or the caller might go to sleep just now
      done_.notify_one();
    }
  }

  void work(int worker) {
    for (int64_t item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < items_;) {
      body_(context_, item, worker);
    }
  }

  static bool is_open(uint64_t job) { return job % 2 != 0; }

  std::mutex turn_;   // held by the call whose job this is
  std::mutex mutex_;  // of those who go to sleep
  std::condition_variable wake_, done_;
  // Counts up when a job is opened and when it is closed. What describes a job is written between
  // jobs, when the busy have left, and read by those who found it open after they were counted.
  alignas(kLine) std::atomic<uint64_t> job_{0};
  ParallelBody body_ = nullptr;
  void* context_ = nullptr;
  int64_t items_ = 0;
  int wanted_ = 0;  // workers 1..wanted_ take part
  alignas(kLine) std::atomic<int64_t> next_{0};
  alignas(kLine) std::atomic<int> busy_{0};  // those who may be at work on the open job
  alignas(kLine) std::atomic<int> asleep_{0};
  int started_ = 0;  // guarded by turn_, as are those that follow
  std::vector<pthread_t> handles_;
  int kept_off_ = -1;              // the CPU that is left to the caller
  cpu_set_t allowed_{}, given_{};  // to threads: without regard to the caller, and with it
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
