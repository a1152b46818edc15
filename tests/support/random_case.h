// Random valid cases: every feature of the contract at random, small sizes, any layout.
#pragma once

#include "harness/case.h"

namespace fovea::test {

// The same seed gives the same case. f64 is not drawn: the fast engines do not take it.
harness::Case random_case(uint64_t seed);

}  // namespace fovea::test
