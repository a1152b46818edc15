// The threads of the host engines: each item once, whether they were awake or asleep.
#include "prim/cpu/thread_pool.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace fovea {
namespace {

// How often each of `items` ran, by `threads` of the pool.
std::vector<int> counts_of(int64_t items, int threads) {
  std::vector<std::atomic<int>> ran(static_cast<size_t>(items));
  std::vector<std::atomic<int>> busy(static_cast<size_t>(threads));
  parallel_for(items, threads, [&](int64_t item, int worker) {
    EXPECT_GE(worker, 0);
    EXPECT_LT(worker, threads);
    EXPECT_EQ(busy[static_cast<size_t>(worker)].fetch_add(1), 0) << "two items of one worker";
    ran[static_cast<size_t>(item)].fetch_add(1);
    busy[static_cast<size_t>(worker)].fetch_sub(1);
  });
  return {ran.begin(), ran.end()};
}

TEST(ThreadPool, RunsEachItemOnce) {
  for (const int threads : {1, 2, 3, 7}) {
    for (const int64_t items : {0, 1, 2, 5, 64}) {
      EXPECT_EQ(counts_of(items, threads), std::vector<int>(static_cast<size_t>(items), 1))
          << items << " items, " << threads << " threads";
    }
  }
}

TEST(ThreadPool, RunsOneJobAfterAnother) {
  for (int job = 0; job < 3000; ++job) {
    const int threads = 2 + job % 3;
    ASSERT_EQ(counts_of(4, threads), std::vector<int>(4, 1)) << "job " << job;
  }
}

TEST(ThreadPool, WakesThreadsThatSleep) {
  for (int job = 0; job < 20; ++job) {
    std::this_thread::sleep_for(std::chrono::milliseconds(job % 4));
    ASSERT_EQ(counts_of(8, 2), std::vector<int>(8, 1)) << "job " << job;
  }
}

// Both items wait for the other: they end only where two threads run them.
TEST(ThreadPool, RunsItemsAtOnce) {
  for (int job = 0; job < 20; ++job) {
    std::this_thread::sleep_for(std::chrono::milliseconds(job % 3));
    std::atomic<int> here{0};
    parallel_for(2, 2, [&](int64_t, int) {
      here.fetch_add(1);
      while (here.load() < 2) std::this_thread::yield();
    });
    EXPECT_EQ(here.load(), 2);
  }
}

// CPUs that the other of two threads may use, once it has slept and been woken by this one.
cpu_set_t cpus_of_a_woken_thread() {
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  cpu_set_t cpus{};
  std::atomic<int> here{0};
  parallel_for(2, 2, [&](int64_t, int worker) {
    if (worker == 1) {
      EXPECT_EQ(sched_getaffinity(0, sizeof cpus, &cpus), 0);
    }
    here.fetch_add(1);
    while (here.load() < 2) std::this_thread::yield();
  });
  return cpus;
}

TEST(ThreadPool, LeavesTheCallersCpuToIt) {
  cpu_set_t all;
  ASSERT_EQ(sched_getaffinity(0, sizeof all, &all), 0);
  if (CPU_COUNT(&all) < 2) GTEST_SKIP() << "one CPU";
  cpus_of_a_woken_thread();  // starts it, before the caller is bound to a CPU
  for (size_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &all)) continue;
    cpu_set_t here{}, others = all;
    CPU_SET(cpu, &here);
    CPU_CLR(cpu, &others);
    ASSERT_EQ(sched_setaffinity(0, sizeof here, &here), 0);
    bool left = false;
    for (int job = 0; job < 50 && !left; ++job) {  // on a busy machine it may take long to sleep
      const cpu_set_t given = cpus_of_a_woken_thread();
      left = CPU_EQUAL(&given, &others);
    }
    EXPECT_TRUE(left) << "the caller is on CPU " << cpu;
  }
  sched_setaffinity(0, sizeof all, &all);
}

TEST(ThreadPool, RunsAJobWithinAJobAlone) {
  std::atomic<int> inner{0};
  parallel_for(4, 2, [&](int64_t, int) {
    parallel_for(3, 2, [&](int64_t, int worker) {
      EXPECT_EQ(worker, 0);
      inner.fetch_add(1);
    });
  });
  EXPECT_EQ(inner.load(), 12);
}

TEST(ThreadPool, ServesSeveralCallers) {
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([] {
      for (int job = 0; job < 300; ++job) {
        ASSERT_EQ(counts_of(5, 3), std::vector<int>(5, 1));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

}  // namespace
}  // namespace fovea
