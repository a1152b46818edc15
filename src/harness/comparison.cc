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

bool is_half(DType dtype) { return dtype == DType::kBf16 || dtype == DType::kF16; }

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

ErrorSum Comparison::sum_for(const char* tensor, DType dtype) const {
  return {tensor, dtype, {is_half(problem_.dtype) ? 1e-4 : 1e-5, 0}};
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
  ErrorSum out = sum_for("out", problem_.dtype);
  const bool half = is_half(problem_.dtype);
  ErrorSum lse("lse", DType::kF32, {0, half ? 1e-3 : 1e-5});
  for (const GroupSample& group : sample(budget)) {
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
  ErrorSum dq = sum_for("dq", problem_.dtype), dk = sum_for("dk", problem_.dtype),
           dv = sum_for("dv", problem_.dtype);
  for (const GroupSample& group : sample(budget)) {
    const auto [exact, plain] = exact_and_plain(
        [&](Arithmetic a) { return reference::sample_backward(a, problem_, t, group, stats); });
    add_rows(dq, t.dq, group, exact.dq, plain.dq);
    add_keys(dk, t.dk, group, exact.dk, plain.dk);
    add_keys(dv, t.dv, group, exact.dv, plain.dv);
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
  ErrorSum sum = sum_for("dbias", t.dbias.dtype);
  size_t at = 0;
  for (const BiasRow& row : rows) {
    for (int64_t j = 0; j < problem_.kv_len; ++j, ++at) {
      sum.add(read_element(t.dbias, row.b, row.h, row.i, j), exact[at], plain[at]);
    }
  }
  keep(sum);
}

void Comparison::sink_gradient() {
  const BackwardTensors& t = tensors_.backward();
  const double queries = static_cast<double>(problem_.batch * problem_.head_q * problem_.q_len);
  const StatsFrom stats =
      row_cost() * queries > cost_limit_ ? StatsFrom::kGiven : StatsFrom::kComputed;
  ErrorSum sum = sum_for("dsink", DType::kF32);
  for (int64_t h = 0; h < problem_.head_q; ++h) {
    const auto [exact, plain] = exact_and_plain(
        [&](Arithmetic a) { return reference::sample_dsink(a, problem_, t, h, stats); });
    sum.add(read_element(t.dsink, h), exact, plain);
  }
  keep(sum);
}

}  // namespace fovea::harness
