// Holds the outputs of a case against the oracle, on all of the case or on a sample that the cost
// limit allows.
#pragma once

#include <memory>

#include "backend/reference/oracle.h"
#include "harness/accuracy.h"
#include "harness/error_sum.h"

namespace fovea::harness {

class Comparison {
 public:
  Comparison(const Case& c, const CaseTensors& tensors, double cost_limit);

  void forward();
  void backward();
  std::vector<Accuracy> result() const { return found_; }

 private:
  // Some query rows, and where key gradients are wanted some keys, of some (batch, KV head).
  struct Budget {
    int64_t groups = 0;
    int64_t rows = 0;  // per group
    int64_t keys = 0;  // per group
  };

  double row_cost() const;  // multiply-adds of one query row, forward
  int64_t group_rows(int64_t b) const;
  std::vector<reference::GroupSample> sample(const Budget& budget) const;
  void add_rows(ErrorSum& sum, const TensorView& result, const reference::GroupSample& group,
                const std::vector<double>& exact, const std::vector<double>& plain) const;
  void add_keys(ErrorSum& sum, const TensorView& result, const reference::GroupSample& group,
                const std::vector<double>& exact, const std::vector<double>& plain) const;
  void bias_gradient();
  void sink_gradient();
  ErrorSum gradient_sum(const char* tensor, DType dtype) const;
  const std::vector<std::unique_ptr<CaseTensors>>& other_draws(int64_t values, double cost);
  void keep(const ErrorSum& sum);

  const Case& case_;
  const AttentionProblem& problem_;
  const CaseTensors& tensors_;
  double cost_limit_;
  std::vector<std::unique_ptr<CaseTensors>> drawn_;
  std::vector<Accuracy> found_;
};

}  // namespace fovea::harness
