// One case and everybody who takes it on: what the benchmark must know of a kind of case to check
// its contenders and to time them side by side.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "cli/bench_case.h"
#include "cli/contender.h"
#include "harness/accuracy.h"

namespace fovea::cli {

// The verdict of one pass: of all its outputs the one with the largest error for its bound.
struct Verdict {
  std::optional<double> max_err;
  std::optional<double> err_bound;
  std::optional<bool> ok;  // nothing: not checked
};
Verdict verdict_of(const std::vector<harness::Accuracy>& outputs);

// What a pass costs at least.
struct Work {
  double flops = 0;
  double bytes = 0;
};

class Arena {
 public:
  virtual ~Arena() = default;

  // Opens the contenders, fovea's own first; peers that cannot take part go to skipped. Fails where
  // fovea itself cannot do the case.
  virtual Status admit(std::vector<Skipped>& skipped) = 0;
  virtual const AttentionProblem& problem() const = 0;  // the operator's, within a layer too
  virtual Work work(BenchPass pass) const = 0;

  // Runs the pass from poisoned outputs, so that none can pass by what an earlier run left there,
  // and compares.
  virtual Result<Verdict> check(Contender& contender, BenchPass pass) = 0;
  // After the checks and before the clock: whatever a timed pass reads is put in place.
  virtual Status prepare() = 0;

  const std::vector<std::unique_ptr<Contender>>& contenders() const { return contenders_; }

 protected:
  // Opens the named engines of torch on the case that it has loaded, if it has.
  void admit_torch(const Status& loaded, const std::vector<std::string>& engines,
                   const BenchCase& what, BenchSetup& setup, std::vector<Skipped>& skipped);

  void add(std::unique_ptr<Contender> contender) { contenders_.push_back(std::move(contender)); }

 private:
  std::vector<std::unique_ptr<Contender>> contenders_;
};

std::unique_ptr<Arena> make_operator_arena(const BenchCase& what, BenchSetup& setup);
std::unique_ptr<Arena> make_layer_arena(const BenchCase& what, BenchSetup& setup);

}  // namespace fovea::cli
