#include "backend/cpu/cut.h"

#include <algorithm>

#include "base/ceil_div.h"

namespace fovea::cpu {
namespace {

// Parts of the keys are multiples of this, so that none is too short to be worth its sums, and in
// the backward pass no shorter than that.
constexpr int64_t kPartKeys = 256, kBackwardPartKeys = 64;

// Tasks for each thread: cores are not equally fast at all times. Query heads take long and lose
// next to nothing by being apart.
constexpr int64_t kTasks = 4, kTasksOfHeads = 8;

int64_t heads_of(const AttentionProblem& p) { return std::max<int64_t>(1, p.batch * p.head_kv); }

}  // namespace

ForwardCut cut_forward(const AttentionProblem& p, const KernelSizes& sizes, int threads) {
  const int64_t heads = heads_of(p), rows = p.head_q / p.head_kv * p.q_len;
  ForwardCut cut;
  cut.rows = std::max<int64_t>(1, std::min<int64_t>(sizes.rows_per_task, rows));
  const int64_t wanted = threads > 1 ? kTasks * threads : 1;
  while (cut.rows > sizes.tile_q && heads * ceil_div(rows, cut.rows) < wanted) {
    cut.rows = round_up(cut.rows / 2, sizes.tile_q);
  }
  cut.chunks = ceil_div(rows, cut.rows);
  const int64_t tasks = std::max<int64_t>(1, heads * cut.chunks);
  const int64_t most = ceil_div(p.kv_len, kPartKeys);
  if (tasks < int64_t{2} * threads && threads > 1 && most > 1) {
    cut.parts = std::min({ceil_div(wanted, tasks), most, int64_t{kMaxPartials}});
  }
  cut.keys = round_up(ceil_div(p.kv_len, cut.parts), kPartKeys);
  return cut;
}

BackwardCut cut_backward(const AttentionProblem& p, const KernelSizes& sizes, int threads) {
  const int64_t group = p.head_q / p.head_kv;
  BackwardCut cut;
  cut.heads = group;
  int64_t tasks = heads_of(p);
  if (threads > 1 && tasks < kTasksOfHeads * threads) {
    cut.heads = ceil_div(group, std::min(group, ceil_div(kTasksOfHeads * threads, tasks)));
    cut.head_parts = ceil_div(group, cut.heads);
    tasks *= cut.head_parts;
  }
  int64_t block = sizes.backward_tile_kv;  // keys that parts have a multiple of
  const auto blocks = [&] { return std::max<int64_t>(1, ceil_div(p.kv_len, block)); };
  if (threads > 1 && tasks < int64_t{3} * threads) {
    // Each part packs its queries and sums its own dq: few parts where heads alone are shared
    // evenly, but some; else many, of less than a block if need be.
    const bool even = tasks % threads == 0;
    while (!even && block > kBackwardPartKeys && tasks * blocks() < int64_t{2} * threads) {
      block /= 2;
    }
    cut.key_parts = std::min(ceil_div((even ? 2 : kTasks) * threads, tasks), blocks());
  }
  cut.keys = round_up(ceil_div(p.kv_len, cut.key_parts), block);
  cut.key_parts = std::max<int64_t>(1, ceil_div(p.kv_len, std::max<int64_t>(cut.keys, 1)));
  return cut;
}

}  // namespace fovea::cpu
