// The table of engines and the choice among them.
#include "plan/choose.h"

#include <algorithm>
#include <string>

#include "backend/cuda/device.h"

namespace fovea {
namespace {

std::string names_of(std::span<const Backend* const> table) {
  std::string names;
  for (size_t i = 0; i < table.size(); ++i) {
    if (i > 0) names += i + 1 == table.size() ? " or " : ", ";
    names.append("\"").append(table[i]->name()).append("\"");
  }
  return names;
}

// What to try instead, where an engine other than those that refused would take the problem.
std::string hint_from(const Backend* other) {
  if (other == nullptr) return {};
  const std::string name = other->name();
  return "the " + name + " backend does (backend = \"" + name + "\")" +
         (name == "reference" ? ", slowly" : "");
}

}  // namespace

std::span<const Backend* const> backends() {
  static const std::vector<const Backend*> table = [] {
    std::vector<const Backend*> all(cuda_backends().begin(), cuda_backends().end());
    all.insert(all.end(), {&cpu_backend(), &reference_backend()});
    return all;
  }();
  return table;
}

Result<Choice> choose(const AttentionProblem& problem, const DeviceInfo& device,
                      std::string_view asked, std::span<const Backend* const> table) {
  const auto is_asked = [&](const Backend* backend) { return backend->name() == asked; };
  if (!asked.empty() && std::none_of(table.begin(), table.end(), is_asked)) {
    return refuse("make_plan", "options.backend", "\"" + std::string(asked) + "\"",
                  must("be " + names_of(table) + ", or empty for the best"));
  }
  Choice choice;
  const Backend* first_willing = nullptr;
  for (const Backend* backend : table) {
    const bool wanted = asked.empty() || is_asked(backend);
    std::vector<std::string> reasons = backend->refusals(problem, device);
    if (reasons.empty() && first_willing == nullptr) first_willing = backend;
    std::string reluctance;
    if (reasons.empty() && asked.empty()) reluctance = backend->reluctance(problem, device);
    if (wanted && reasons.empty() && reluctance.empty()) {
      choice.backend = backend;
      return choice;
    }
    if (!reluctance.empty()) reasons.push_back(std::move(reluctance));
    if (reasons.empty()) reasons.push_back(std::string(asked) + " was asked for");
    choice.passed_over.push_back({backend->name(), std::move(reasons)});
    if (!asked.empty() && wanted) break;
  }
  if (asked.empty() && first_willing != nullptr) {
    choice.backend = first_willing;  // nobody else was there to leave the problem to
    return choice;
  }
  if (asked.empty()) {
    return unsupported("make_plan", "no backend takes this problem on this device",
                       choice.passed_over);
  }
  // The one asked for refused: only its reasons matter, and whether another would take it.
  for (const Backend* backend : table) {
    if (first_willing != nullptr) break;
    if (!is_asked(backend) && backend->refusals(problem, device).empty()) first_willing = backend;
  }
  return unsupported("make_plan",
                     "backend \"" + std::string(asked) + "\" does not take this problem",
                     {choice.passed_over.back()}, hint_from(first_willing));
}

AttentionProblem with_tight_mask(const AttentionProblem& problem) {
  AttentionProblem tight = problem;
  Mask& mask = tight.mask;
  // Positions run from kv_len - q_len to kv_len - 1 in every sequence, and its own lengths are at
  // most the problem's.
  if (mask.left >= problem.kv_len - 1) mask.left = Mask::kUnbounded;
  if (mask.right >= problem.q_len - 1) mask.right = Mask::kUnbounded;
  const bool sees_all = mask.left == Mask::kUnbounded && mask.right == Mask::kUnbounded;
  mask.prefix = sees_all ? 0 : std::min(mask.prefix, problem.kv_len);
  return tight;
}

}  // namespace fovea
