// The commands that take one case: `fovea explain` plans it, `fovea check` holds it to the oracle.
#include <cstdio>
#include <optional>

#include "cli/commands.h"
#include "cli/device_name.h"
#include "cli/table.h"
#include "harness/accuracy.h"

namespace fovea::cli {
namespace {

struct PlannedCase {
  harness::Case one_case;
  Plan plan;
  Device device;
};

// Prints what is wrong with the case, or with the wish for that backend or device, and gives
// nothing.
std::optional<PlannedCase> plan_case(const char* command, const CaseOptions& options) {
  Result<harness::Case> parsed = harness::parse_case(options.text);
  if (!parsed.ok()) {
    std::fprintf(stderr, "%s: --case \"%s\": %s\n", command, options.text.c_str(),
                 parsed.status().message().c_str());
    return std::nullopt;
  }
  const Result<Device> device = parse_device(command, options.device);
  if (!device.ok()) {
    std::fprintf(stderr, "%s\n", device.status().message().c_str());
    return std::nullopt;
  }
  Result<Plan> plan =
      make_plan(parsed->problem, *device,
                {.backend = options.backend,
                 .threads = options.threads,
                 .softmax = options.running_max ? SoftmaxRule::kRunningMax : SoftmaxRule::kAny});
  if (!plan.ok()) {
    std::fprintf(stderr, "%s: %s\n", command, plan.status().message().c_str());
    return std::nullopt;
  }
  return PlannedCase{std::move(*parsed), std::move(*plan), *device};
}

}  // namespace

int run_explain(const CaseOptions& options) {
  const std::optional<PlannedCase> planned = plan_case("explain", options);
  if (!planned) return kExitUsage;
  std::string text = planned->plan.explain();
  if (text.empty() || text.back() != '\n') text += '\n';
  std::printf("case  %s\n%s", format_case(planned->one_case).c_str(), text.c_str());
  return kExitOk;
}

int run_check(const CaseOptions& options) {
  const std::optional<PlannedCase> planned = plan_case("check", options);
  if (!planned) return kExitUsage;
  harness::CaseTensors tensors(planned->one_case);
  const std::vector<harness::Accuracy> outputs =
      measure_accuracy(planned->one_case, planned->plan, tensors, planned->device);
  Table table;
  table.add_column("output", Table::Align::kLeft);
  for (const char* title : {"max error", "bound", "rms error", "rms bound", "mean error"}) {
    table.add_column(title, Table::Align::kRight);
  }
  table.add_column("verdict", Table::Align::kLeft);
  bool ok = !outputs.empty();
  for (const harness::Accuracy& a : outputs) {
    ok = ok && a.ok;
    table.add_row({a.tensor, format("%.3e", a.max_err), format("%.3e", a.bound),
                   format("%.3e", a.rms), format("%.3e", a.rms_bound), format("%+.1e", a.mean_err),
                   a.ok ? "ok" : "WRONG"});
  }
  const bool clean = tensors.canaries_intact() && tensors.inputs_unchanged();
  std::printf("case    %s\nkernel  %s\n\n%s\n", format_case(planned->one_case).c_str(),
              planned->plan.kernel().c_str(), table.text().c_str());
  if (!clean) std::printf("memory outside the outputs was written to\n");
  std::printf("%s\n", ok && clean ? "ok" : "FAILED");
  return ok && clean ? kExitOk : kExitFailed;
}

}  // namespace fovea::cli
