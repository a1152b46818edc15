// One implementation of one case, as the benchmark drives it: fovea's own engines and the peers
// answer the same questions, so that all are measured by the same hand.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "cli/bench_pass.h"
#include "fovea/plan.h"
#include "harness/tensors.h"

namespace fovea::cli {

class Contender {
 public:
  virtual ~Contender() = default;
  virtual std::string impl() const = 0;    // "fovea-cpu"
  virtual std::string kernel() const = 0;  // "cpu/amx/bf16"

  // Seconds that `repeats` runs took together. With kUncounted one more run comes first, which
  // brings this contender's data back into the caches and its threads out of sleep.
  enum class WarmRun { kNone, kUncounted };
  virtual Result<double> sample(BenchPass pass, int repeats, WarmRun warm) = 0;

  // How its last samples of a pass were taken: "host" by the host's clock, "graph" by a GPU's
  // around replays of a graph, "eager" by a GPU's around calls one by one.
  virtual const char* timing(BenchPass) const { return "host"; }

  // Leaves the pass's outputs in the tensors of the case.
  virtual Status produce(BenchPass pass) = 0;
  virtual bool gives_lse() const = 0;

  // False where it works on inputs of its own: like the case's, but not to be held to its oracle.
  virtual bool comparable() const { return true; }

  // Beyond inputs and outputs; nothing when it cannot be told.
  virtual std::optional<int64_t> memory_bytes(BenchPass pass) = 0;
};

// A plan of this library on the CPU. The tensors must outlive it; backward reads the out and lse
// they hold.
class FoveaContender : public Contender {
 public:
  FoveaContender(Plan plan, harness::CaseTensors& tensors, bool backward);

  std::string impl() const override { return "fovea-" + plan_.backend(); }
  std::string kernel() const override { return plan_.kernel(); }
  Result<double> sample(BenchPass pass, int repeats, WarmRun warm) override;
  Status produce(BenchPass pass) override;
  bool gives_lse() const override { return true; }
  std::optional<int64_t> memory_bytes(BenchPass pass) override;

 private:
  Plan plan_;
  harness::CaseTensors& tensors_;
  harness::OwnedWorkspace workspace_;
};

}  // namespace fovea::cli
