// What every engine gives: whether it takes a problem, how much scratch it needs, and the two
// passes. Engines are handed tensors that api/ has already checked against the problem.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "fovea/plan.h"

namespace fovea {

// What plan/ needs to know about where a problem will run; a plain value, so that plans for any
// machine can be tested on any other.
struct GpuInfo {
  std::string name;
  int sm = 0;  // compute capability, 90 for 9.0
  int sm_count = 0;
  int shared_bytes = 0;  // the most a block may use
  int l2_bytes = 0;
  int64_t memory_bytes = 0;
  friend bool operator==(const GpuInfo&, const GpuInfo&) = default;
};

struct DeviceInfo {
  Device device;
  int threads = 1;  // CPU: worker threads a plan may use
  std::string isa;  // CPU: instruction set the engine will use, "avx512"
  GpuInfo gpu;      // CUDA devices
  SoftmaxRule softmax = SoftmaxRule::kAny;
  Arithmetic arithmetic = Arithmetic::kExact;
  friend bool operator==(const DeviceInfo&, const DeviceInfo&) = default;
};

// A problem bound to one engine on one device: immutable, shared by all copies of a Plan.
class BoundKernel {
 public:
  virtual ~BoundKernel() = default;
  virtual std::string name() const = 0;      // "cpu/amx/bf16"
  virtual std::string describe() const = 0;  // tiles, splits, threads: one line
  virtual size_t workspace_bytes(Pass pass) const = 0;
  virtual Status forward(const ForwardTensors& t, Workspace workspace, Stream stream) const = 0;
  virtual Status backward(const BackwardTensors& t, Workspace workspace, Stream stream) const = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const char* name() const = 0;
  // Empty when the problem is taken on that device, otherwise one line per reason:
  // "dim_qk is 320, takes 8..256".
  virtual std::vector<std::string> refusals(const AttentionProblem& problem,
                                            const DeviceInfo& device) const = 0;
  // Why it would rather leave a problem that it takes to an engine further down, which is faster
  // there: "head dims up to 32 are faster elsewhere". Empty where it would not.
  virtual std::string reluctance(const AttentionProblem& /*problem*/,
                                 const DeviceInfo& /*device*/) const {
    return {};
  }
  // Only for problems without refusals.
  virtual std::unique_ptr<BoundKernel> bind(const AttentionProblem& problem,
                                            const DeviceInfo& device) const = 0;
};

// One accessor per engine; plan/ lists them in order of preference.
const Backend& reference_backend();
const Backend& cpu_backend();

}  // namespace fovea
