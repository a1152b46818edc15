// The threads of the host engines: each item once, whether they were awake or asleep.
#include "prim/cpu/thread_pool.h"

#include <gtest/gtest.h>

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
