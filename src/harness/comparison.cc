// What of a case is compared with the oracle, and the comparison.
#include "harness/comparison.h"

#include <algorithm>
#include <cmath>
#include <future>

#include "backend/reference/rows_io.h"
#include "harness/random.h"

namespace fovea::harness {
namespace {

using reference::Arithmetic;
using reference::BiasRow;
using reference::GroupSample;
using reference::StatsFrom;

constexpr int64_t kFewRows = 8;      // at least, per group, whatever they cost
constexpr int64_t kSomeGroups = 4;   // of a case too large to check whole
constexpr double kBackwardWork = 4;  // multiply-adds of backward over those of forward
constexpr int64_t kEnoughRows = 64;  // for the plain formula's error not to be a matter of luck
constexpr int64_t kMostDraws = 16;

bool is_half(DType dtype) { return dtype == DType::kBf16 || dtype == DType::kF16; }

double floor_of(DType dtype) { return is_half(dtype) ? 1e-4 : 1e-5; }

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

// Both arithmetics of one question, on two threads.
template <typename Ask>
auto exact_and_plain(const Ask& ask) {
  auto exact = std::async(std::launch::async, [&] { return ask(Arithmetic::kExact); });
  auto plain = ask(Arithmetic::kPlain);
  return std::pair(exact.get(), std::move(plain));
}

}  // namespace

Comparison::Comparison(const Case& c, const CaseTensors& tensors, double cost_limit)
    : case_(c), problem_(c.problem), tensors_(tensors), cost_limit_(cost_limit) {}

double Comparison::row_cost() const {
  return static_cast<double>(problem_.kv_len) *
         static_cast<double>(problem_.dim_qk + problem_.dim_v);
}

int64_t Comparison::group_rows(int64_t b) const {
  const int64_t heads = problem_.head_kv > 0 ? problem_.head_q / problem_.head_kv : 0;
  return sequence_at(problem_, tensors_.forward(), b).q_len * heads;
}

std::vector<GroupSample> Comparison::sample(const Budget& budget) const {
  std::vector<GroupSample> groups;
  const uint64_t key = hash64(case_.seed ^ 0x5A5A);
  for (const int64_t g : draw(problem_.batch * problem_.head_kv, budget.groups, key)) {
    GroupSample group{g / problem_.head_kv, g % problem_.head_kv, {}, {}};
    const int64_t heads = problem_.head_q / problem_.head_kv;
    const Sequence sequence = sequence_at(problem_, tensors_.forward(), group.b);
    const uint64_t own = hash64(key + static_cast<uint64_t>(g));
    for (const int64_t row : draw(group_rows(group.b), budget.rows, own)) {
      group.rows.push_back({group.head_kv * heads + row / sequence.q_len, row % sequence.q_len});
    }
    const bool packed = problem_.layout == Layout::kPacked;
    group.keys = draw(packed ? sequence.kv_len : problem_.kv_len, budget.keys, own + 1);
    groups.push_back(std::move(group));
  }
  return groups;
}

// Gradients hang on lse, which the contract keeps in f32: exp(s - lse) is off by its last bit.
ErrorSum Comparison::gradient_sum(const char* tensor, DType dtype) const {
  double lse = 0;
  if (problem_.dtype != DType::kF64) {
    for (int64_t b = 0; b < problem_.batch; ++b) {
      const Sequence sequence = sequence_at(problem_, tensors_.forward(), b);
      for (int64_t h = 0; h < problem_.head_q; ++h) {
        for (int64_t i = 0; i < sequence.q_len; ++i) {
          const TensorView& t = tensors_.forward().lse;
          const auto x = reference::load_one<double>(t, reference::lse_element(t, sequence, h, i));
          if (std::isfinite(x)) lse = std::max(lse, std::abs(x));
        }
      }
    }
  }
  return {tensor, dtype, {floor_of(problem_.dtype), 0, 0x1p-23 * lse}};
}

// The error of the plain formula on a few rows is a matter of luck: rows share the rounding of one
// delta, one lse. A small case is therefore drawn again with other seeds for the yardstick alone,
// until there are enough rows or the cost is spent.
const std::vector<std::unique_ptr<CaseTensors>>& Comparison::other_draws(int64_t rows,
                                                                         double cost) {
  int64_t draws = std::min(kMostDraws, kEnoughRows / std::max<int64_t>(1, rows));
  while (draws > 1 && cost * static_cast<double>(draws) > cost_limit_) --draws;
  Case other = case_;
  const CaseLengths lengths = lengths_of(case_);
  if (problem_.layout == Layout::kPacked) other.q_lens = lengths.q;
  if (problem_.layout == Layout::kPacked || has(problem_.features, Feature::kKeyLengths)) {
    other.kv_lens = lengths.kv;
  }
  while (static_cast<int64_t>(drawn_.size()) + 1 < draws) {
    other.seed = hash64(case_.seed + drawn_.size());
    drawn_.push_back(std::make_unique<CaseTensors>(other));
  }
  if (static_cast<int64_t>(drawn_.size()) > std::max<int64_t>(0, draws - 1)) {
    drawn_.resize(static_cast<size_t>(std::max<int64_t>(0, draws - 1)));
  }
  return drawn_;
}

void Comparison::keep(const ErrorSum& sum) { found_.push_back(sum.result()); }

void Comparison::add_rows(ErrorSum& sum, const TensorView& result, const GroupSample& group,
                          const std::vector<double>& exact,
                          const std::vector<double>& plain) const {
  const Sequence sequence = sequence_at(problem_, tensors_.forward(), group.b);
  const auto dim = result.sizes[static_cast<size_t>(result.rank - 1)];
  std::vector<double> row(static_cast<size_t>(dim));
  size_t at = 0;
  for (const auto& r : group.rows) {
    reference::load(result, reference::query_row(result, sequence, r.h, r.i), dim, row.data());
    for (const double x : row) {
      sum.add(x, exact[at], plain[at]);
      ++at;
    }
  }
}

void Comparison::add_keys(ErrorSum& sum, const TensorView& result, const GroupSample& group,
                          const std::vector<double>& exact,
                          const std::vector<double>& plain) const {
  const Sequence sequence = sequence_at(problem_, tensors_.forward(), group.b);
  const auto dim = result.sizes[static_cast<size_t>(result.rank - 1)];
  std::vector<double> row(static_cast<size_t>(dim));
  size_t at = 0;
  for (const int64_t j : group.keys) {
    const int64_t first = reference::key_row(result, sequence, group.head_kv, j);
    reference::load(result, first, dim, row.data());
    for (const double x : row) {
      sum.add(x, exact[at], plain[at]);
      ++at;
    }
  }
}

void Comparison::forward() {
  const ForwardTensors& t = tensors_.forward();
  const int64_t all = problem_.batch * problem_.head_kv;
  const double group_cost = static_cast<double>(problem_.q_len * problem_.head_q) /
                            static_cast<double>(std::max<int64_t>(1, problem_.head_kv)) *
                            row_cost();
  Budget budget{all, problem_.q_len * problem_.head_q, 0};
  if (group_cost * static_cast<double>(all) > cost_limit_) {
    budget.groups = std::min(all, kSomeGroups);
    budget.rows =
        std::max(kFewRows, static_cast<int64_t>(cost_limit_ / row_cost()) / budget.groups);
  }
  ErrorSum out("out", problem_.dtype, {floor_of(problem_.dtype), 0, 0});
  const bool half = is_half(problem_.dtype);
  ErrorSum lse("lse", DType::kF32, {0, half ? 1e-3 : 1e-5, 0});
  const std::vector<GroupSample> groups = sample(budget);
  for (const GroupSample& group : groups) {
    const auto [exact, plain] = exact_and_plain(
        [&](Arithmetic a) { return reference::sample_forward(a, problem_, t, group); });
    add_rows(out, t.out, group, exact.out, plain.out);
    if (!t.lse.given()) continue;
    const Sequence sequence = sequence_at(problem_, t, group.b);
    for (size_t n = 0; n < group.rows.size(); ++n) {
      const auto& r = group.rows[n];
      const int64_t at = reference::lse_element(t.lse, sequence, r.h, r.i);
      // The rule for lse is a plain tolerance, so the yardstick's own error is left out of it.
      lse.add(reference::load_one<double>(t.lse, at), exact.lse[n], exact.lse[n]);
    }
  }
  const int64_t rows = problem_.batch * problem_.head_q * problem_.q_len;
  for (const auto& other : other_draws(rows, group_cost * static_cast<double>(all))) {
    for (const GroupSample& group : groups) {
      const auto [exact, plain] = exact_and_plain([&](Arithmetic a) {
        return reference::sample_forward(a, problem_, other->forward(), group);
      });
      add_plain(out, exact.out, plain.out);
    }
  }
  keep(out);
  if (t.lse.given()) keep(lse);
}

void Comparison::backward() {
  const BackwardTensors& t = tensors_.backward();
  const int64_t all = problem_.batch * problem_.head_kv;
  const int64_t rows = problem_.q_len * problem_.head_q / std::max<int64_t>(1, problem_.head_kv);
  const double group_cost = static_cast<double>(rows) * row_cost();
  Budget budget{all, rows, problem_.kv_len};
  StatsFrom stats = StatsFrom::kComputed;
  if (kBackwardWork * group_cost * static_cast<double>(all) > cost_limit_) {
    budget.groups = std::clamp<int64_t>(
        static_cast<int64_t>(cost_limit_ / (kBackwardWork * group_cost)), 1, all);
  }
  if (kBackwardWork * group_cost > cost_limit_) {
    // Not even one group fits: some of its rows and keys, by the outputs that forward() has checked
    // where a forward pass over the group is too much.
    if (group_cost > cost_limit_) stats = StatsFrom::kGiven;
    const double share = cost_limit_ / (kBackwardWork * group_cost);
    const auto part = [share](int64_t size) {
      return std::max(kFewRows, static_cast<int64_t>(share * static_cast<double>(size)));
    };
    budget.rows = part(rows);
    budget.keys = part(problem_.kv_len);
  }
  ErrorSum dq = gradient_sum("dq", problem_.dtype), dk = gradient_sum("dk", problem_.dtype),
           dv = gradient_sum("dv", problem_.dtype);
  const std::vector<GroupSample> groups = sample(budget);
  for (const GroupSample& group : groups) {
    const auto [exact, plain] = exact_and_plain(
        [&](Arithmetic a) { return reference::sample_backward(a, problem_, t, group, stats); });
    add_rows(dq, t.dq, group, exact.dq, plain.dq);
    add_keys(dk, t.dk, group, exact.dk, plain.dk);
    add_keys(dv, t.dv, group, exact.dv, plain.dv);
  }
  const double cost = kBackwardWork * group_cost * static_cast<double>(all);
  for (const auto& other : other_draws(all * rows, cost)) {
    for (const GroupSample& group : groups) {
      const auto [exact, plain] = exact_and_plain([&](Arithmetic a) {
        return reference::sample_backward(a, problem_, other->backward(), group,
                                          StatsFrom::kComputed);
      });
      add_plain(dq, exact.dq, plain.dq);
      add_plain(dk, exact.dk, plain.dk);
      add_plain(dv, exact.dv, plain.dv);
    }
  }
  keep(dq);
  keep(dk);
  keep(dv);
  if (t.dbias.given()) bias_gradient();
  if (t.dsink.given()) sink_gradient();
}

void Comparison::bias_gradient() {
  const BackwardTensors& t = tensors_.backward();
  const auto& sizes = t.dbias.sizes;
  const int64_t all = sizes[0] * sizes[1] * sizes[2];
  const double queries = static_cast<double>(problem_.batch * problem_.head_q * problem_.q_len);
  const double cost = all > 0 ? 2 * row_cost() * queries / static_cast<double>(all) : 0;
  const auto fits = cost > 0 ? static_cast<int64_t>(cost_limit_ / cost) : all;
  std::vector<BiasRow> rows;
  for (const int64_t at : draw(all, std::max<int64_t>(2, fits), case_.seed)) {
    rows.push_back({at / sizes[2] / sizes[1], at / sizes[2] % sizes[1], at % sizes[2]});
  }
  const auto [exact, plain] = exact_and_plain([&](Arithmetic a) {
    return reference::sample_dbias(a, problem_, t, rows, StatsFrom::kComputed);
  });
  ErrorSum sum = gradient_sum("dbias", t.dbias.dtype);
  size_t at = 0;
  for (const BiasRow& row : rows) {
    for (int64_t j = 0; j < problem_.kv_len; ++j, ++at) {
      sum.add(read_element(t.dbias, row.b, row.h, row.i, j), exact[at], plain[at]);
    }
  }
  for (const auto& other : other_draws(static_cast<int64_t>(queries), cost * double(all))) {
    const auto [more_exact, more_plain] = exact_and_plain([&](Arithmetic a) {
      return reference::sample_dbias(a, problem_, other->backward(), rows, StatsFrom::kComputed);
    });
    add_plain(sum, more_exact, more_plain);
  }
  keep(sum);
}

void Comparison::sink_gradient() {
  const BackwardTensors& t = tensors_.backward();
  const double queries = static_cast<double>(problem_.batch * problem_.head_q * problem_.q_len);
  const StatsFrom stats =
      row_cost() * queries > cost_limit_ ? StatsFrom::kGiven : StatsFrom::kComputed;
  ErrorSum sum = gradient_sum("dsink", DType::kF32);
  for (int64_t h = 0; h < problem_.head_q; ++h) {
    const auto [exact, plain] = exact_and_plain(
        [&](Arithmetic a) { return reference::sample_dsink(a, problem_, t, h, stats); });
    sum.add(read_element(t.dsink, h), exact, plain);
    for (const auto& other : other_draws(problem_.head_q, row_cost() * queries)) {
      const auto [more_exact, more_plain] = exact_and_plain([&](Arithmetic a) {
        return reference::sample_dsink(a, problem_, other->backward(), h, StatsFrom::kComputed);
      });
      sum.add_plain(more_exact, more_plain);
    }
  }
  keep(sum);
}

}  // namespace fovea::harness
