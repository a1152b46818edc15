// Which engine takes a problem: the first in order of preference that has no objection, or the one
// the caller asked for. A pure function of its arguments, so it can be tested for any machine.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "backend/backend.h"
#include "base/refusal.h"

namespace fovea {

// Every engine of this build, the preferred first.
std::span<const Backend* const> backends();

struct Choice {
  const Backend* backend = nullptr;
  std::vector<EngineRefusal> passed_over;  // the engines preferred to it, and why not them
};

Result<Choice> choose(const AttentionProblem& problem, const DeviceInfo& device,
                      std::string_view asked, std::span<const Backend* const> table = backends());

// The same problem with a mask no wider than its lengths: a reach past either end becomes
// kUnbounded, so that engines add it to positions without overflow and take their unmasked path
// when nothing is masked (one query token under a causal mask).
AttentionProblem with_tight_mask(const AttentionProblem& problem);

}  // namespace fovea
