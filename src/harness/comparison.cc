// The outputs of a case beside what the oracle says of them.
#include "harness/comparison.h"

#include <algorithm>
#include <cmath>

#include "backend/reference/rows_io.h"

namespace fovea::harness {
namespace {

using reference::GroupSample;
using reference::StatsFrom;

bool is_half(DType dtype) { return dtype == DType::kBf16 || dtype == DType::kF16; }

constexpr int64_t kSecondLook = 64;  // times the draws of the first

double floor_of(DType dtype) { return is_half(dtype) ? 1e-4 : 1e-5; }

}  // namespace

Comparison::Comparison(const Case& c, const CaseTensors& tensors, double cost_limit)
    : case_(c), problem_(case_.problem), tensors_(tensors), cost_limit_(cost_limit) {}

// Gradients hang on exp(s - lse), and both are f32: lse because the contract keeps it so, s because
// it is computed again. Each is off by its last bit.
ErrorSum::Floor Comparison::gradient_floor() const {
  double lse = 0;
  if (problem_.dtype != DType::kF64) {
    const TensorView& t = tensors_.forward().lse;
    for (int64_t b = 0; b < problem_.batch; ++b) {
      const Sequence sequence = sequence_at(problem_, tensors_.forward(), b);
      for (int64_t h = 0; h < problem_.head_q; ++h) {
        for (int64_t i = 0; i < sequence.q_len; ++i) {
          const auto x = reference::load_one<double>(t, reference::lse_element(t, sequence, h, i));
          if (std::isfinite(x)) lse = std::max(lse, std::abs(x));
        }
      }
    }
  }
  return {floor_of(problem_.dtype), 0, 0x1p-22 * lse, case_.data == DataFamily::kConstant};
}

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

std::vector<Accuracy> Comparison::forward() {
  return with_second_look([this] { return compare_forward(); });
}

std::vector<Accuracy> Comparison::backward() {
  return with_second_look([this] { return compare_backward(); });
}

// Two maxima of random errors are compared, and once in some thousand cases the yardstick was
// merely lucky. Before a result is called wrong the yardstick is taken over many more draws: what
// is wrong stays wrong.
template <typename Compare>
std::vector<Accuracy> Comparison::with_second_look(const Compare& compare) {
  std::vector<Accuracy> found = compare();
  const auto hopeful = [](const Accuracy& a) { return a.ok || std::isfinite(a.max_err); };
  const auto good = [](const Accuracy& a) { return a.ok; };
  if (std::all_of(found.begin(), found.end(), good) ||
      !std::all_of(found.begin(), found.end(), hopeful) || patience_ > 1) {
    return found;
  }
  patience_ = kSecondLook;
  forward_.reset();
  backward_.reset();
  bias_.reset();
  sink_.reset();
  return compare();
}

std::vector<Accuracy> Comparison::compare_forward() {
  const ForwardTensors& t = tensors_.forward();
  if (!forward_) forward_ = ask_forward();
  ErrorSum out = forward_->out, lse("lse", DType::kF32, 1);
  for (size_t g = 0; g < forward_->groups.size(); ++g) {
    const GroupSample& group = forward_->groups[g];
    const auto& [exact, plain] = forward_->samples[g];
    add_rows(out, t.out, group, exact.out, plain.out);
    if (!t.lse.given()) continue;
    const Sequence sequence = sequence_at(problem_, t, group.b);
    for (size_t n = 0; n < group.rows.size(); ++n) {
      const auto& r = group.rows[n];
      const int64_t at = reference::lse_element(t.lse, sequence, r.h, r.i);
      // The rule for lse is a plain tolerance, so the yardstick's own error is left out of it; but
      // tf32 rounds the inputs, which no lse can make up for.
      lse.add(reference::load_one<double>(t.lse, at), exact.lse[n],
              takes_tf32(problem_) ? plain.lse[n] : exact.lse[n]);
    }
  }
  std::vector<Accuracy> found{
      out.result({floor_of(problem_.dtype), 0, 0, case_.data == DataFamily::kConstant})};
  if (t.lse.given())
    found.push_back(lse.result({0, is_half(problem_.dtype) ? 1e-3 : 1e-5, 0, true}));
  return found;
}

std::vector<Accuracy> Comparison::compare_backward() {
  const BackwardTensors& t = tensors_.backward();
  const Budget budget = backward_budget();
  const bool lasting = budget.stats == StatsFrom::kComputed;  // else it hangs on out and lse
  if (!backward_ || !lasting) backward_ = ask_backward(budget);
  ErrorSum dq = backward_->dq, dk = backward_->dk, dv = backward_->dv;
  for (size_t g = 0; g < backward_->groups.size(); ++g) {
    const GroupSample& group = backward_->groups[g];
    const auto& [exact, plain] = backward_->samples[g];
    add_rows(dq, t.dq, group, exact.dq, plain.dq);
    add_keys(dk, t.dk, group, exact.dk, plain.dk);
    add_keys(dv, t.dv, group, exact.dv, plain.dv);
  }
  const ErrorSum::Floor floor = gradient_floor();
  std::vector<Accuracy> found{dq.result(floor), dk.result(floor), dv.result(floor)};
  if (t.dbias.given()) found.push_back(bias_gradient());
  if (t.dsink.given()) found.push_back(sink_gradient());
  return found;
}

Accuracy Comparison::bias_gradient() {
  const TensorView& dbias = tensors_.backward().dbias;
  if (!bias_) bias_ = ask_bias();
  ErrorSum sum = bias_->sum;
  size_t at = 0;
  for (const auto& row : bias_->rows) {
    for (int64_t j = 0; j < problem_.kv_len; ++j, ++at) {
      sum.add(read_element(dbias, row.b, row.h, row.i, j), bias_->sample.exact[at],
              bias_->sample.plain[at]);
    }
  }
  return sum.result(gradient_floor());
}

Accuracy Comparison::sink_gradient() {
  const bool lasting = forward_cost() <= cost_limit_;
  if (!sink_ || !lasting) {
    sink_ = ask_sink(lasting ? StatsFrom::kComputed : StatsFrom::kGiven);
  }
  ErrorSum sum = sink_->sum;
  for (int64_t h = 0; h < problem_.head_q; ++h) {
    const auto at = static_cast<size_t>(h);
    sum.add(read_element(tensors_.backward().dsink, h), sink_->sample.exact[at],
            sink_->sample.plain[at]);
  }
  return sum.result(gradient_floor());
}

}  // namespace fovea::harness
