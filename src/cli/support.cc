// Asks every engine for its refusals of one probe problem per feature.
#include "cli/support.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "backend/cuda/device.h"
#include "plan/choose.h"
#include "plan/device.h"

namespace fovea::cli {
namespace {

struct Probe {
  const char* feature;
  std::function<void(AttentionProblem&)> ask;
};

AttentionProblem plain_problem() {
  AttentionProblem problem;
  problem.batch = 2;
  problem.head_q = problem.head_kv = 8;
  problem.q_len = problem.kv_len = 128;
  problem.dim_qk = problem.dim_v = 64;
  problem.dtype = DType::kBf16;  // which every engine takes
  return problem;
}

const std::vector<Probe>& probes() {
  using P = AttentionProblem;
  static const std::vector<Probe> all = {
      {"f32", [](P& p) { p.dtype = DType::kF32; }},
      {"bf16", [](P& p) { p.dtype = DType::kBf16; }},
      {"f16", [](P& p) { p.dtype = DType::kF16; }},
      {"f64", [](P& p) { p.dtype = DType::kF64; }},
      {"grouped and multi-query heads", [](P& p) { p.head_kv = 2; }},
      {"dim_v other than dim_qk (192/128)", [](P& p) { p.dim_qk = 192, p.dim_v = 128; }},
      {"latent dims (576/512)", [](P& p) { p.dim_qk = 576, p.dim_v = 512, p.head_kv = 1; }},
      {"odd dims (33/17)", [](P& p) { p.dim_qk = 33, p.dim_v = 17; }},
      {"causal mask", [](P& p) { p.mask = Mask::causal(); }},
      {"window", [](P& p) { p.mask = Mask::window(32, 16); }},
      {"prefix", [](P& p) { p.mask = Mask::causal().with_prefix(8); }},
      {"additive bias, with gradient", [](P& p) { p.features = Feature::kBias; }},
      {"boolean mask", [](P& p) { p.features = Feature::kBoolMask; }},
      {"key lengths", [](P& p) { p.features = Feature::kKeyLengths; }},
      {"packed sequences (varlen)",
       [](P& p) { p.layout = Layout::kPacked, p.total_q = 200, p.total_kv = 200; }},
      {"ALiBi", [](P& p) { p.features = Feature::kAlibi; }},
      {"sink, with gradient", [](P& p) { p.features = Feature::kSink; }},
      {"softcap", [](P& p) { p.softcap = 30; }},
      {"dropout", [](P& p) { p.dropout = 0.1; }},
      {"deterministic", [](P& p) { p.determinism = Determinism::kRequired; }},
  };
  return all;
}

// CUDA engines are asked about a GPU of one kind, whatever this machine has, so that the table is
// the same everywhere.
DeviceInfo usual_gpu() {
  DeviceInfo info;
  info.device = Device::cuda(0);
  info.gpu.name = "H100";
  info.gpu.sm = 90;
  info.gpu.sm_count = 132;
  info.gpu.shared_bytes = 227 * 1024;
  info.gpu.l2_bytes = 50 * 1024 * 1024;
  info.gpu.memory_bytes = int64_t{80} << 30;
  return info;
}

bool is_cuda(const Backend* backend) {
  const auto engines = cuda_backends();
  return std::find(engines.begin(), engines.end(), backend) != engines.end();
}

}  // namespace

Result<std::string> support_table() {
  const Result<DeviceInfo> device = discover(Device::cpu(), {});
  if (!device.ok()) return device.status();
  const DeviceInfo gpu = usual_gpu();
  std::string text = "| feature |";
  std::string rule = "|---|";
  for (const Backend* backend : backends()) {
    text += std::string(" ") + backend->name() + " |";
    rule += "---|";
  }
  text += "\n" + rule + "\n";
  for (const Probe& probe : probes()) {
    AttentionProblem problem = plain_problem();
    probe.ask(problem);
    text += std::string("| ") + probe.feature + " |";
    for (const Backend* backend : backends()) {
      const std::vector<std::string> reasons =
          backend->refusals(problem, is_cuda(backend) ? gpu : *device);
      text += reasons.empty() ? " yes |" : " no: " + reasons.front() + " |";
    }
    text += "\n";
  }
  return text;
}

}  // namespace fovea::cli
