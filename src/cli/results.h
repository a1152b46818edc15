// Rows of a benchmark and the document they are written to.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/bench_pass.h"
#include "cli/gpu_state.h"
#include "cli/json.h"
#include "cli/machine.h"
#include "fovea/plan.h"

namespace fovea::cli {

// One implementation, one case, one pass.
struct Row {
  std::string suite;
  std::string case_text;
  AttentionProblem problem;  // the operator's, within a layer too
  std::string layer;         // "ccgqa"; empty: the operator alone
  int64_t embed_dim = 0;     // of a layer
  BenchPass pass = BenchPass::kForward;
  std::string impl;
  std::string kernel;
  std::string timing;  // by which clock: "host", "graph" or "eager" (contender.h)
  double ms = 0;       // median
  double ms_p10 = 0;
  double ms_p90 = 0;
  double tflops = 0;
  double gbps = 0;                      // minimal bytes over time
  std::optional<double> peak_fraction;  // of the CPU's measured, or the GPU's stated peak
  std::optional<double> max_err;        // of the output nearest its bound, or furthest past it
  std::optional<double> err_bound;
  std::optional<int64_t> mem_bytes;
  std::optional<bool> ok;  // nothing: not checked
};

// An implementation, or one case of it, that was asked for and could not be measured.
struct Skipped {
  std::string impl;
  std::string why;
  std::string case_text;  // empty: all of them
};

struct Results {
  Machine machine;
  int threads = 0;
  std::string isa;
  std::string gpu;            // "NVIDIA H200"; empty: the CPU was measured
  std::string cuda;           // runtime version, with a GPU
  GpuState gpu_state;         // while it was measured
  std::string torch_version;  // empty: torch took no part
  std::string commit;
  std::string date;
  std::vector<Row> rows;
  std::vector<Skipped> skipped;
};

std::string mask_text(const Mask& mask);                  // "causal", "window:128:0 prefix=16"
std::string heads_text(const AttentionProblem& problem);  // "16/4"

Json to_json(const Results& results);

}  // namespace fovea::cli
