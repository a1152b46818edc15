// The ways to spoil a valid request, each by one change.
#pragma once

#include <span>
#include <string>

#include "fuzz/invalid_subject.h"

namespace fovea::invalid {

struct Mutation {
  const char* name;
  // Spoils the subject and gives how the message must begin after "<call>: "; empty when this
  // subject has nothing to spoil that way, and then it is left as it was.
  std::string (*apply)(Subject& subject);
  bool spoils_problem;  // make_plan refuses, not the call
};

std::span<const Mutation> problem_mutations();
std::span<const Mutation> tensor_mutations();
std::span<const Mutation> value_mutations();

}  // namespace fovea::invalid
