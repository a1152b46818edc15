// Benchmark suites: bench/cases/NAME.json, products of case keys written compactly.
//
//   {"name": "cpu", "about": "what it is for",
//    "cases": [{"b": 2, "hq,hkv": [[8, 8], [16, 4]], "d": [64, 128], "q": [512, 1024],
//               "mask": ["none", "causal"], "dtype": ["f32", "bf16"], "pass": "fwd,bwd"}]}
//
// An entry stands for the product of its lists, the first key varying slowest. A key is one of a
// case's, or several joined by commas, which then vary together. true gives a key without a value
// ("sink": true); false leaves it out.
#pragma once

#include <string>
#include <vector>

#include "fovea/status.h"
#include "harness/layer_case.h"

namespace fovea::cli {

struct Suite {
  std::string name;
  std::string about;
  std::vector<harness::AnyCase> cases;
};

// The folder of the suites: `given` when not empty, else $FOVEA_BENCH_DIR/cases or
// $FOVEA_BENCH_DIR itself, the source tree's bench/cases, bench/cases under the current directory.
Result<std::string> find_cases_dir(const std::string& given);

Result<std::vector<std::string>> suite_names(const std::string& dir);
Result<Suite> load_suite(const std::string& dir, const std::string& name);

}  // namespace fovea::cli
