// What arenas of every kind share.
#include "cli/arena.h"

#include <cmath>

namespace fovea::cli {

Verdict verdict_of(const std::vector<harness::Accuracy>& outputs) {
  Verdict verdict;
  double worst = -1;
  bool ok = true;
  for (const harness::Accuracy& a : outputs) {
    ok = ok && a.ok;
    double share = a.bound > 0 ? a.max_err / a.bound : a.max_err > 0 ? HUGE_VAL : 0;
    if (std::isnan(share)) share = HUGE_VAL;
    if (share > worst) {
      worst = share;
      verdict.max_err = a.max_err;
      verdict.err_bound = a.bound;
    }
  }
  if (worst >= 0) verdict.ok = ok;
  return verdict;
}

void Arena::admit_torch(const Status& loaded, const std::vector<std::string>& engines,
                        const BenchCase& what, BenchSetup& setup, std::vector<Skipped>& skipped) {
  for (const std::string& engine : engines) {
    Result<std::unique_ptr<Contender>> contender = loaded;
    if (loaded.ok()) contender = setup.torch->open(engine);
    if (contender.ok()) {
      add(std::move(*contender));
    } else {
      skipped.push_back({"torch-" + engine, contender.status().message(), what.text});
    }
  }
}

}  // namespace fovea::cli
