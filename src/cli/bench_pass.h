// What is timed of a case.
#pragma once

#include "fovea/plan.h"

namespace fovea::cli {

enum class BenchPass {
  kForward,
  kBackward,  // of the operator: alone, from outputs that a forward left
  kTraining,  // of a layer: a forward and its backward in a row
};

constexpr const char* pass_text(BenchPass pass) {
  switch (pass) {
    case BenchPass::kForward: return "fwd";
    case BenchPass::kBackward: return "bwd";
    case BenchPass::kTraining: return "fwd+bwd";
  }
  return "?";
}

// The operator's word for it: cases of the operator have no kTraining.
constexpr Pass operator_pass(BenchPass pass) {
  return pass == BenchPass::kForward ? Pass::kForward : Pass::kBackward;
}

}  // namespace fovea::cli
