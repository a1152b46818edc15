// The choice of kernel and order.
#include "backend/cuda/hopper/forward/plan.h"

#include <algorithm>

namespace fovea::cuda::hopper {
namespace {

// Three warpgroups hide more of each other's softmax than two; what a row takes with two, to one
// with three (H200, head dim 64).
constexpr double kTwoWarpgroups = 1.12;
// Blocks of keys that all blocks of the GPU together work on before a ticket pays for its memset.
constexpr int64_t kTicketBlocks = 40;  // an SM

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What a problem takes with a kernel, in rows that one SM works on.
double cost(const AttentionProblem& p, const ForwardConfig& c, const GpuInfo& gpu) {
  const int64_t tiles = ceil_div(p.q_len, c.tile_q()) * p.head_q * p.batch;
  const double waves = tiles >= 4 * gpu.sm_count
                           ? static_cast<double>(tiles) / gpu.sm_count
                           : static_cast<double>(ceil_div(tiles, gpu.sm_count));
  return waves * c.tile_q() * (c.warpgroups == 2 ? kTwoWarpgroups : 1.0);
}

const ForwardKernel* find_kernel(const AttentionProblem& p, const GpuInfo& gpu) {
  const ForwardKernel* best = nullptr;
  for (const ForwardKernel* kernel : forward_kernels()) {
    const ForwardConfig& c = kernel->config;
    if (kernel->dtype != p.dtype || c.dim_qk < p.dim_qk || c.dim_v < p.dim_v) continue;
    if (best != nullptr) {
      const int dims = c.dim_qk + c.dim_v, best_dims = best->config.dim_qk + best->config.dim_v;
      if (dims > best_dims) continue;
      if (dims == best_dims && cost(p, c, gpu) >= cost(p, best->config, gpu)) continue;
    }
    best = kernel;
  }
  return best;
}

// Heads whose K and V stay in the cache while a section is worked on.
int64_t section_heads(const AttentionProblem& p, const GpuInfo& gpu) {
  const bool unequal = p.mask.right >= 0;  // rows differ in length
  if (!unequal) return 1;
  const int64_t bytes = p.kv_len * (p.dim_qk + p.dim_v) * int64_t{2} / (p.head_q / p.head_kv);
  const int64_t fit = gpu.l2_bytes / 2 / std::max<int64_t>(1, bytes);
  return std::clamp<int64_t>(fit, 1, p.batch * p.head_q);
}

}  // namespace

ForwardPlan plan_forward(const AttentionProblem& p, const GpuInfo& gpu) {
  ForwardPlan plan;
  plan.kernel = find_kernel(p, gpu);
  if (plan.kernel == nullptr) return plan;
  const ForwardConfig& c = plan.kernel->config;
  const int64_t row_tiles = ceil_div(p.q_len, c.tile_q());
  const int64_t tiles = row_tiles * p.head_q * p.batch;
  plan.row_tiles = static_cast<int>(row_tiles);
  plan.section_heads = static_cast<int>(section_heads(p, gpu));
  plan.blocks = static_cast<int>(std::min<int64_t>(tiles, gpu.sm_count));
  const bool unequal = p.mask.right >= 0 || p.layout == Layout::kPacked ||
                       has(p.features, Feature::kKeyLengths);
  plan.ticket =
      unequal && tiles * ceil_div(p.kv_len, c.tile_kv) > kTicketBlocks * gpu.sm_count;
  return plan;
}

}  // namespace fovea::cuda::hopper
