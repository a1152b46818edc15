// The engines of programs that test this machine's CPU.
#include "backend/backend.h"
#include "backend/cpu/isa.h"
#include "support/engines.h"

namespace fovea::test {

std::vector<Engine> fast_engines() {
  std::vector<Engine> engines;
  const AttentionProblem any = must_parse("q=1 d=64").problem;
  for (const std::string& isa : cpu_isas()) {
    DeviceInfo device;
    device.isa = isa;
    if (cpu_backend().refusals(any, device).empty()) engines.push_back({"cpu", isa});
  }
  return engines;
}

std::vector<Engine> every_engine() {
  std::vector<Engine> engines = fast_engines();
  engines.insert(engines.begin(), {"reference", ""});
  return engines;
}

}  // namespace fovea::test
