// Holds the outputs of a case against the oracle, on all of the case or on a sample that the cost
// limit allows. What the oracle says is kept, so that several engines can be compared at its price.
#pragma once

#include <memory>
#include <optional>
#include <utility>

#include "backend/reference/oracle.h"
#include "harness/accuracy.h"
#include "harness/error_sum.h"

namespace fovea::harness {

class Comparison {
 public:
  // The inputs behind the tensors must stay as they are; the outputs may be written again.
  Comparison(const Case& c, const CaseTensors& tensors, double cost_limit = kDefaultCost);

  std::vector<Accuracy> forward();
  std::vector<Accuracy> backward();

 private:
  template <typename T>
  struct Both {
    T exact, plain;
  };

  // Some query rows, and where key gradients are wanted some keys, of some (batch, KV head).
  struct Budget {
    int64_t groups = 0;
    int64_t rows = 0;  // per group
    int64_t keys = 0;  // per group
    reference::StatsFrom stats = reference::StatsFrom::kComputed;
  };

  struct ForwardAnswers {
    std::vector<reference::GroupSample> groups;
    std::vector<Both<reference::ForwardSample>> samples;
    ErrorSum out;  // the yardstick of other draws
  };
  struct BackwardAnswers {
    std::vector<reference::GroupSample> groups;
    std::vector<Both<reference::BackwardSample>> samples;
    ErrorSum dq, dk, dv;
  };
  struct BiasAnswers {
    std::vector<reference::BiasRow> rows;
    Both<std::vector<double>> sample;
    ErrorSum sum;
  };
  struct SinkAnswers {
    Both<std::vector<double>> sample;  // [head_q]
    ErrorSum sum;
  };

  template <typename Compare>
  std::vector<Accuracy> with_second_look(const Compare& compare);
  std::vector<Accuracy> compare_forward();
  std::vector<Accuracy> compare_backward();
  template <typename Ask>
  static auto ask_both(const Ask& ask, double cost);
  Budget forward_budget() const;
  Budget backward_budget() const;
  ForwardAnswers ask_forward();
  BackwardAnswers ask_backward(const Budget& budget);
  BiasAnswers ask_bias();
  SinkAnswers ask_sink(reference::StatsFrom stats);
  Accuracy bias_gradient();
  Accuracy sink_gradient();

  double row_cost() const;      // multiply-adds of one query row, forward
  double forward_cost() const;  // of all rows
  int64_t group_count() const;
  int64_t rows_per_group() const;
  std::vector<reference::GroupSample> sample(const Budget& budget) const;
  std::vector<const CaseTensors*> other_draws(int64_t rows, double cost);
  ErrorSum::Floor gradient_floor() const;
  void add_rows(ErrorSum& sum, const TensorView& result, const reference::GroupSample& group,
                const std::vector<double>& exact, const std::vector<double>& plain) const;
  void add_keys(ErrorSum& sum, const TensorView& result, const reference::GroupSample& group,
                const std::vector<double>& exact, const std::vector<double>& plain) const;

  Case case_;
  const AttentionProblem& problem_;
  const CaseTensors& tensors_;
  double cost_limit_;
  int64_t patience_ = 1;  // times the draws that a first look takes for the yardstick
  std::vector<std::unique_ptr<CaseTensors>> drawn_;
  std::optional<ForwardAnswers> forward_;
  std::optional<BackwardAnswers> backward_;
  std::optional<BiasAnswers> bias_;
  std::optional<SinkAnswers> sink_;
};

}  // namespace fovea::harness
