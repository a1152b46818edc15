// The benchmark's JSON. Its keys are a promise: `fovea compare` and outside tools read them.
#include "cli/results.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "cli/json.h"

namespace fovea::cli {
namespace {

template <typename T>
Json or_null(const std::optional<T>& value) {
  return value ? Json(*value) : Json();
}

Json or_null(const std::string& text) { return text.empty() ? Json() : Json(text); }

Json to_json(const Machine& m, const Results& r) {
  const GpuState& gpu = r.gpu_state;
  return {{"cpu", m.cpu},
          {"architecture", m.architecture},
          {"cores", m.cores},
          {"threads_available", m.threads},
          {"threads", r.threads},
          {"isa", or_null(r.isa)},
          {"mhz", or_null(m.mhz)},
          {"memory_bytes", m.memory_bytes},
          {"load", m.load},
          {"os", m.os},
          {"compiler", m.compiler},
          {"torch", or_null(r.torch_version)},
          {"gpu", or_null(r.gpu)},
          {"driver", or_null(gpu.driver)},
          {"cuda", or_null(r.cuda)},
          {"gpu_sm_mhz", or_null(gpu.sm_mhz)},
          {"gpu_memory_mhz", or_null(gpu.memory_mhz)},
          {"gpu_power_limit_w", or_null(gpu.power_limit_w)},
          {"gpu_power_w", or_null(gpu.power_w)}};
}

Json to_json(const Row& row) {
  const AttentionProblem& p = row.problem;
  return {{"suite", row.suite},
          {"case", row.case_text},
          {"impl", row.impl},
          {"kernel", row.kernel},
          {"pass", pass_text(row.pass)},
          {"layer", or_null(row.layer)},
          {"e", row.layer.empty() ? Json() : Json(row.embed_dim)},
          {"dtype", dtype_name(p.dtype)},
          {"b", p.batch},
          {"hq", p.head_q},
          {"hkv", p.head_kv},
          {"q", p.q_len},
          {"kv", p.kv_len},
          {"d", p.dim_qk},
          {"dv", p.dim_v},
          {"mask", mask_text(p.mask)},
          {"timing", row.timing},
          {"ms", row.ms},
          {"ms_p10", row.ms_p10},
          {"ms_p90", row.ms_p90},
          {"tflops", row.tflops},
          {"gbps", row.gbps},
          {"peak_fraction", or_null(row.peak_fraction)},
          {"max_err", or_null(row.max_err)},
          {"err_bound", or_null(row.err_bound)},
          {"mem_bytes", or_null(row.mem_bytes)},
          {"ok", or_null(row.ok)}};
}

std::string side_text(int64_t keys) {
  return keys == Mask::kUnbounded ? "inf" : std::to_string(keys);
}

}  // namespace

std::string mask_text(const Mask& mask) {
  std::string text = "window:" + side_text(mask.left) + ":" + side_text(mask.right);
  if (mask.left == Mask::kUnbounded && mask.right == Mask::kUnbounded) text = "none";
  if (mask.left == Mask::kUnbounded && mask.right == 0) text = "causal";
  if (mask.prefix > 0) text += " prefix=" + std::to_string(mask.prefix);
  return text;
}

std::string heads_text(const AttentionProblem& problem) {
  return std::to_string(problem.head_q) + "/" + std::to_string(problem.head_kv);
}

Json to_json(const Results& results) {
  Json rows = Json::array(), skipped = Json::array();
  for (const Row& row : results.rows) rows.push_back(to_json(row));
  for (const Skipped& s : results.skipped) {
    const std::string place = s.case_text.empty() ? "" : s.case_text + ": ";
    skipped.push_back({{"impl", s.impl}, {"why", place + s.why}});
  }
  return {{"machine", to_json(results.machine, results)},
          {"commit", results.commit},
          {"date", results.date},
          {"rows", std::move(rows)},
          {"skipped", std::move(skipped)}};
}

}  // namespace fovea::cli
