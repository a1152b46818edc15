#include "backend/backend.h"

namespace fovea {
namespace {
class CpuBackend : public Backend {
 public:
  const char* name() const override { return "cpu"; }
  std::vector<std::string> refusals(const AttentionProblem&, const DeviceInfo&) const override {
    return {"not built yet"};
  }
  std::unique_ptr<BoundKernel> bind(const AttentionProblem&, const DeviceInfo&) const override {
    return nullptr;
  }
};
}  // namespace

const Backend& cpu_backend() {
  static const CpuBackend backend;
  return backend;
}

}  // namespace fovea
