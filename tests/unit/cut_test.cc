// How the CPU engine cuts its backward pass into tasks.
#include "backend/cpu/cut.h"

#include <gtest/gtest.h>

namespace fovea::test {
namespace {

const cpu::KernelSizes kSizes = {.rows_per_task = 1024,
                                 .tile_q = 64,
                                 .tile_kv = 256,
                                 .stream_rows = 4,
                                 .backward_tile_q = 64,
                                 .backward_tile_kv = 128};

AttentionProblem problem(int64_t batch, int64_t head_q, int64_t head_kv, int64_t keys) {
  AttentionProblem p;
  p.batch = batch;
  p.head_q = head_q;
  p.head_kv = head_kv;
  p.q_len = p.kv_len = keys;
  return p;
}

int64_t tasks(const AttentionProblem& p, const cpu::BackwardCut& cut) {
  return p.batch * p.head_kv * cut.head_parts * cut.key_parts;
}

TEST(BackwardCut, PartsCoverAllHeadsAndKeysOnce) {
  for (const int64_t group : {1, 2, 3, 5, 8, 71}) {
    for (const int64_t head_kv : {1, 2, 3, 40}) {
      for (const int64_t keys : {1, 64, 127, 300, 4096}) {
        for (const int threads : {1, 2, 5, 16, 64}) {
          const AttentionProblem p = problem(1, group * head_kv, head_kv, keys);
          const cpu::BackwardCut cut = cpu::cut_backward(p, kSizes, threads);
          EXPECT_GE(cut.head_parts * cut.heads, group);
          EXPECT_LT((cut.head_parts - 1) * cut.heads, group);
          EXPECT_GE(cut.key_parts * cut.keys, keys);
          EXPECT_LT((cut.key_parts - 1) * cut.keys, keys);
        }
      }
    }
  }
}

TEST(BackwardCut, OneThreadCutsNothing) {
  const cpu::BackwardCut cut = cpu::cut_backward(problem(1, 8, 1, 4096), kSizes, 1);
  EXPECT_EQ(cut.head_parts, 1);
  EXPECT_EQ(cut.key_parts, 1);
}

// Parts of the heads read nothing twice, parts of the keys read the queries again.
TEST(BackwardCut, HeadsAreCutBeforeKeys) {
  const cpu::BackwardCut some = cpu::cut_backward(problem(1, 32, 8, 1024), kSizes, 2);
  EXPECT_EQ(some.head_parts, 2);
  EXPECT_EQ(some.key_parts, 1);
  const cpu::BackwardCut all = cpu::cut_backward(problem(1, 16, 4, 1024), kSizes, 16);
  EXPECT_EQ(all.head_parts, 4);
  EXPECT_EQ(all.key_parts, 2);
  EXPECT_EQ(cpu::cut_backward(problem(1, 8, 8, 1024), kSizes, 16).head_parts, 1);
}

TEST(BackwardCut, ThreadsHaveTasksWhereThereAreEnough) {
  for (const int threads : {2, 3, 5, 16}) {
    for (const int64_t head_q : {2, 8, 16}) {
      for (const int64_t head_kv : {int64_t{1}, int64_t{2}, head_q}) {
        const AttentionProblem p = problem(1, head_q, head_kv, 4096);
        EXPECT_GE(tasks(p, cpu::cut_backward(p, kSizes, threads)), int64_t{2} * threads)
            << head_q << " over " << head_kv << ", " << threads << " threads";
      }
    }
  }
}

}  // namespace
}  // namespace fovea::test
