// Work in strips: all of one is prepared before its parts, everything is done once, and who has no
// strip helps.
#include "prim/cpu/strips.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "prim/cpu/thread_pool.h"

namespace fovea {
namespace {

struct alignas(kStripBytes) StripMemory {
  std::byte bytes[kStripBytes];
};

// Strip n has `parts_of(n)` parts, up to 1 + n % 4 of them done at once, and some pieces of
// preparation; checks the order and counts everything.
template <typename PartsOf>
void run_and_check(int64_t strips, int threads, PartsOf parts_of) {
  const auto pieces_of = [](int64_t strip) { return strip % 3; };
  const auto at_once = [](int64_t strip) { return 1 + strip % 4; };
  std::vector<StripMemory> memory(static_cast<size_t>(strips), StripMemory{});
  for (StripMemory& m : memory) {
    for (std::byte& b : m.bytes) b = std::byte{0xff};  // whatever was there
  }
  std::vector<std::atomic<int>> prepared(static_cast<size_t>(strips));
  std::vector<std::vector<std::atomic<int>>> done;
  for (int64_t n = 0; n < strips; ++n) done.emplace_back(static_cast<size_t>(parts_of(n)));
  parallel_strips(
      strips, threads, memory.empty() ? nullptr : memory[0].bytes,
      [&](int64_t strip) {
        return StripSize{pieces_of(strip), parts_of(strip), at_once(strip)};
      },
      [&](int64_t strip, int64_t piece, int worker) {
        EXPECT_LT(worker, threads);
        EXPECT_LT(piece, pieces_of(strip));
        std::this_thread::yield();
        prepared[static_cast<size_t>(strip)].fetch_add(1 << piece);
      },
      [&](int64_t strip, int64_t begin, int64_t end, int worker) {
        EXPECT_LT(worker, threads);
        EXPECT_EQ(prepared[static_cast<size_t>(strip)].load(), (1 << pieces_of(strip)) - 1);
        EXPECT_LT(begin, end);
        EXPECT_LE(end - begin, at_once(strip));
        for (int64_t n = begin; n < end; ++n) {
          done[static_cast<size_t>(strip)].at(static_cast<size_t>(n)).fetch_add(1);
        }
      });
  for (int64_t n = 0; n < strips; ++n) {
    EXPECT_EQ(prepared[static_cast<size_t>(n)].load(), (1 << pieces_of(n)) - 1) << "strip " << n;
    for (const auto& count : done[static_cast<size_t>(n)]) EXPECT_EQ(count.load(), 1);
  }
}

TEST(Strips, AllPartsOnce) {
  for (const int threads : {1, 2, 3, 7}) {
    for (const int64_t strips : {0, 1, 2, 5, 24}) {
      SCOPED_TRACE(testing::Message() << strips << " strips, " << threads << " threads");
      run_and_check(strips, threads, [](int64_t) { return 3; });
      run_and_check(strips, threads, [](int64_t n) { return n % 4; });  // some have none
      run_and_check(strips, threads, [](int64_t n) { return 40 - n; });
    }
  }
}

TEST(Strips, OneCallAfterAnother) {
  for (int call = 0; call < 1000; ++call) {
    run_and_check(3 + call % 5, 2 + call % 2, [](int64_t n) { return 1 + n; });
  }
}

// The two pieces of the only strip wait for each other, and so do its parts: they end only where a
// second thread helps.
TEST(Strips, ThreadsWithoutAStripHelp) {
  StripMemory memory;
  std::atomic<int> preparing{0}, doing{0};
  const auto meet = [](std::atomic<int>& here) {
    here.fetch_add(1);
    while (here.load() < 2) std::this_thread::yield();
  };
  parallel_strips(
      1, 2, memory.bytes,
      [](int64_t) {
        return StripSize{2, 2};
      },
      [&](int64_t, int64_t, int) { meet(preparing); },
      [&](int64_t, int64_t, int64_t, int) {
        EXPECT_EQ(preparing.load(), 2);
        meet(doing);
      });
  EXPECT_EQ(doing.load(), 2);
}

// Of 24 parts, up to four at once, how many are done together, on a thread that is one of `threads`
// but has to do it all, for the others are taken.
std::vector<int64_t> counts_of_one(int threads) {
  StripMemory memory;
  std::vector<int64_t> counts;
  const auto all = [&] {
    parallel_strips(
        1, threads, memory.bytes,
        [](int64_t) {
          return StripSize{0, 24, 4};
        },
        [](int64_t, int64_t, int) {},
        [&](int64_t, int64_t begin, int64_t end, int) { counts.push_back(end - begin); });
  };
  parallel_for(2, 2, [&](int64_t item, int) {
    if (item == 0) all();
  });
  return counts;
}

// As many at once as are best together while many are left, the last one by one; few threads come
// to that late.
TEST(Strips, FewerPartsAtOnceTowardsTheEnd) {
  EXPECT_EQ(counts_of_one(1), (std::vector<int64_t>{4, 4, 4, 4, 4, 4}));
  EXPECT_EQ(counts_of_one(2), (std::vector<int64_t>{4, 4, 4, 4, 4, 2, 1, 1}));
  const std::vector<int64_t> many{4, 4, 4, 3, 2, 1, 1, 1, 1, 1, 1, 1};
  EXPECT_EQ(counts_of_one(4), many);
  EXPECT_EQ(counts_of_one(16), many);
}

// The pool's threads are taken: one thread does it all.
TEST(Strips, WithinAJob) {
  parallel_for(2, 2, [](int64_t, int) { run_and_check(4, 2, [](int64_t) { return 2; }); });
}

}  // namespace
}  // namespace fovea
