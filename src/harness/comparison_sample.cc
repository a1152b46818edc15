// What of a case the oracle is asked, and the plain formula with it, within the cost limit.
#include <algorithm>
#include <future>

#include "backend/sequence.h"
#include "harness/comparison.h"
#include "harness/random.h"

namespace fovea::harness {
namespace {

using reference::GroupSample;
using reference::StatsFrom;

constexpr int64_t kFewRows = 8;      // at least, per group, whatever they cost
constexpr int64_t kSomeGroups = 4;   // of a case too large to check whole
constexpr double kBackwardWork = 4;  // multiply-adds of backward over those of forward
constexpr int64_t kEnoughRows = 64;  // for the plain formula's error not to be a matter of luck
constexpr int64_t kMostDraws = 16;
constexpr int64_t kOddRow = 32;      // large logits: about one row in so many sees keys compete
constexpr double kThreadCost = 3e5;  // multiply-adds below which a thread costs more than it saves

void add_plain(ErrorSum& sum, const std::vector<double>& exact, const std::vector<double>& plain) {
  for (size_t i = 0; i < exact.size(); ++i) sum.add_plain(exact[i], plain[i]);
}

// Up to `count` of [0, size), rising: both ends and others drawn by the key.
std::vector<int64_t> draw(int64_t size, int64_t count, uint64_t key) {
  std::vector<int64_t> drawn;
  if (count >= size) {
    for (int64_t i = 0; i < size; ++i) drawn.push_back(i);
    return drawn;
  }
  drawn = {0, size - 1};
  for (uint64_t i = 2; i < static_cast<uint64_t>(count); ++i) {
    drawn.push_back(static_cast<int64_t>(hash64(key + i) % static_cast<uint64_t>(size)));
  }
  std::sort(drawn.begin(), drawn.end());
  drawn.erase(std::unique(drawn.begin(), drawn.end()), drawn.end());
  return drawn;
}

}  // namespace

// Both arithmetics of one question, on two threads where it is large.
template <typename Ask>
auto Comparison::ask_both(const Ask& ask, double cost) {
  const auto policy = cost > kThreadCost ? std::launch::async : std::launch::deferred;
  auto exact = std::async(policy, [&] { return ask(Arithmetic::kExact); });
  auto plain = ask(Arithmetic::kPlain);
  return Both<decltype(plain)>{exact.get(), std::move(plain)};
}

double Comparison::row_cost() const {
  return static_cast<double>(problem_.kv_len) *
         static_cast<double>(problem_.dim_qk + problem_.dim_v);
}

double Comparison::forward_cost() const {
  return row_cost() * static_cast<double>(group_count()) * static_cast<double>(rows_per_group());
}

int64_t Comparison::group_count() const { return problem_.batch * problem_.head_kv; }

int64_t Comparison::rows_per_group() const {
  return problem_.q_len * (problem_.head_q / problem_.head_kv);
}

Comparison::Budget Comparison::forward_budget() const {
  if (forward_cost() <= cost_limit_) return {group_count(), rows_per_group(), 0};
  const int64_t groups = std::min(group_count(), kSomeGroups);
  return {groups, std::max(kFewRows, static_cast<int64_t>(cost_limit_ / row_cost()) / groups), 0};
}

Comparison::Budget Comparison::backward_budget() const {
  const double group_cost = row_cost() * static_cast<double>(rows_per_group());
  const double fits = group_cost > 0 ? cost_limit_ / (kBackwardWork * group_cost) : 1e18;
  const auto all = static_cast<double>(group_count());
  Budget budget{group_count(), rows_per_group(), problem_.kv_len, StatsFrom::kComputed};
  if (fits < all) budget.groups = std::max<int64_t>(1, static_cast<int64_t>(fits));
  if (fits < 1) {
    // Not even one group fits: some of its rows and keys, by the outputs that forward() has checked
    // where a forward pass over the group is too much.
    if (group_cost > cost_limit_) budget.stats = StatsFrom::kGiven;
    const auto part = [fits](int64_t size) {
      return std::max(kFewRows, static_cast<int64_t>(fits * static_cast<double>(size)));
    };
    budget.rows = part(budget.rows);
    budget.keys = part(budget.keys);
  }
  return budget;
}

std::vector<GroupSample> Comparison::sample(const Budget& budget) const {
  std::vector<GroupSample> groups;
  const uint64_t key = hash64(case_.seed ^ 0x5A5A);
  const int64_t heads = problem_.head_q / problem_.head_kv;
  for (const int64_t g : draw(group_count(), budget.groups, key)) {
    GroupSample group{g / problem_.head_kv, g % problem_.head_kv, {}, {}};
    const Sequence sequence = sequence_at(problem_, tensors_.forward(), group.b);
    const uint64_t own = hash64(key + static_cast<uint64_t>(g));
    for (const int64_t row : draw(sequence.q_len * heads, budget.rows, own)) {
      group.rows.push_back({group.head_kv * heads + row / sequence.q_len, row % sequence.q_len});
    }
    const bool packed = problem_.layout == Layout::kPacked;
    group.keys = draw(packed ? sequence.kv_len : problem_.kv_len, budget.keys, own + 1);
    groups.push_back(std::move(group));
  }
  return groups;
}

// The error of the plain formula on a few rows is a matter of luck: rows share the rounding of one
// delta, one lse. A small case is therefore drawn again with other seeds for the yardstick alone,
// until there are enough rows or the cost is spent.
std::vector<const CaseTensors*> Comparison::other_draws(int64_t rows, double cost) {
  // Rows that see nothing say nothing, and with fewer keys than queries most may be such.
  rows =
      std::min(rows, problem_.batch * problem_.head_q * std::min(problem_.q_len, problem_.kv_len));
  if (case_.data == DataFamily::kConstant) rows = 1;  // they are all alike
  // Large logits make one weight 1 and the rest 0, but for the odd row where two keys compete, and
  // that row alone decides the maximum. Over 50,000 rows the CPU engine's rms error is 0.85 to 1.05
  // of the plain formula's; over a few hundred their maxima differ by up to 5 either way.
  const int64_t odd = case_.data == DataFamily::kLargeLogits ? kOddRow : 1;
  const int64_t enough = kEnoughRows * odd * patience_;
  int64_t draws =
      std::min(kMostDraws * (odd > 1 ? 4 : 1) * patience_, enough / std::max<int64_t>(1, rows)) - 1;
  if (cost > 0) draws = std::min(draws, static_cast<int64_t>(cost_limit_ / cost));
  Case other = case_;
  const CaseLengths lengths = lengths_of(case_);
  if (problem_.layout == Layout::kPacked) other.q_lens = lengths.q;
  if (problem_.layout == Layout::kPacked || has(problem_.features, Feature::kKeyLengths)) {
    other.kv_lens = lengths.kv;
  }
  while (static_cast<int64_t>(drawn_.size()) < draws) {
    other.seed = hash64(case_.seed + drawn_.size());
    drawn_.push_back(std::make_unique<CaseTensors>(other));
  }
  std::vector<const CaseTensors*> chosen;
  for (int64_t i = 0; i < draws; ++i) chosen.push_back(drawn_[static_cast<size_t>(i)].get());
  return chosen;
}

Comparison::ForwardAnswers Comparison::ask_forward() {
  ForwardAnswers answers{
      sample(forward_budget()), {}, ErrorSum("out", problem_.dtype, problem_.dim_v)};
  const double cost = forward_cost() / static_cast<double>(std::max<int64_t>(1, group_count()));
  const auto ask = [&](const CaseTensors& tensors, const GroupSample& group) {
    return ask_both(
        [&](Arithmetic a) {
          return reference::sample_forward(a, problem_, tensors.forward(), group);
        },
        cost);
  };
  for (const GroupSample& group : answers.groups) answers.samples.push_back(ask(tensors_, group));
  for (const auto* other : other_draws(group_count() * rows_per_group(), forward_cost())) {
    for (const GroupSample& group : answers.groups) {
      const auto [exact, plain] = ask(*other, group);
      add_plain(answers.out, exact.out, plain.out);
    }
  }
  return answers;
}

Comparison::BackwardAnswers Comparison::ask_backward(const Budget& budget) {
  BackwardAnswers answers{sample(budget),
                          {},
                          ErrorSum("dq", problem_.dtype, problem_.dim_qk),
                          ErrorSum("dk", problem_.dtype, problem_.dim_qk),
                          ErrorSum("dv", problem_.dtype, problem_.dim_v)};
  const double cost = forward_cost() / static_cast<double>(std::max<int64_t>(1, group_count()));
  const auto ask = [&](const CaseTensors& tensors, const GroupSample& group, StatsFrom stats) {
    return ask_both(
        [&](Arithmetic a) {
          return reference::sample_backward(a, problem_, tensors.backward(), group, stats);
        },
        cost);
  };
  for (const GroupSample& group : answers.groups) {
    answers.samples.push_back(ask(tensors_, group, budget.stats));
  }
  const int64_t rows = group_count() * rows_per_group();
  for (const auto* other : other_draws(rows, kBackwardWork * forward_cost())) {
    for (const GroupSample& group : answers.groups) {
      const auto [exact, plain] = ask(*other, group, StatsFrom::kComputed);
      add_plain(answers.dq, exact.dq, plain.dq);
      add_plain(answers.dk, exact.dk, plain.dk);
      add_plain(answers.dv, exact.dv, plain.dv);
    }
  }
  return answers;
}

Comparison::BiasAnswers Comparison::ask_bias() {
  const TensorView& dbias = tensors_.backward().dbias;
  const auto& sizes = dbias.sizes;
  const int64_t all = sizes[0] * sizes[1] * sizes[2];
  const double whole = 2 * forward_cost();
  BiasAnswers answers{{}, {}, ErrorSum("dbias", dbias.dtype, 1)};
  // A row of a bias broadcast over everything costs as much as all: at least both ends are checked.
  const auto fits = whole > cost_limit_
                        ? static_cast<int64_t>(cost_limit_ / whole * static_cast<double>(all))
                        : all;
  for (const int64_t at : draw(all, std::max<int64_t>(2, fits), case_.seed)) {
    answers.rows.push_back({at / sizes[2] / sizes[1], at / sizes[2] % sizes[1], at % sizes[2]});
  }
  const auto ask = [&](const CaseTensors& tensors) {
    return ask_both(
        [&](Arithmetic a) {
          return reference::sample_dbias(a, problem_, tensors.backward(), answers.rows,
                                         StatsFrom::kComputed);
        },
        whole);
  };
  answers.sample = ask(tensors_);
  const int64_t rows = std::min(all * problem_.kv_len, group_count() * rows_per_group());
  for (const auto* other : other_draws(rows, whole)) {
    const auto [exact, plain] = ask(*other);
    add_plain(answers.sum, exact, plain);
  }
  return answers;
}

Comparison::SinkAnswers Comparison::ask_sink(StatsFrom stats) {
  SinkAnswers answers{{}, ErrorSum("dsink", DType::kF32, 1)};
  const auto ask = [&](const CaseTensors& tensors, StatsFrom from) {
    return ask_both(
        [&](Arithmetic a) {
          std::vector<double> heads;
          for (int64_t h = 0; h < problem_.head_q; ++h) {
            heads.push_back(reference::sample_dsink(a, problem_, tensors.backward(), h, from));
          }
          return heads;
        },
        forward_cost());
  };
  answers.sample = ask(tensors_, stats);
  if (stats == StatsFrom::kGiven) return answers;
  for (const auto* other : other_draws(problem_.head_q, forward_cost())) {
    const auto [exact, plain] = ask(*other, StatsFrom::kComputed);
    add_plain(answers.sum, exact, plain);
  }
  return answers;
}

}  // namespace fovea::harness
