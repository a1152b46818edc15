// The choice of the kernel.
#include "backend/cuda/hopper/backward/plan.h"

#include <algorithm>

#include "backend/cuda/portable/plan.h"

namespace fovea::cuda::hopper {
namespace {

// What the kernel must have for a multiprocessor, that its blocks, larger than the portable
// engine's, gain more than they take to begin and waste. H200: 4096 rows of a KV head gain 3 % with
// the fewest blocks, 2048 lose up to 10 %.
constexpr int64_t kLeastRows = 31;   // that see a tile of keys
constexpr int64_t kLeastKeys = 3;    // of a sequence
constexpr int64_t kLeastShare = 16;  // one multiprocessor in that many has keys of its own

bool pays(const AttentionProblem& p, const BackwardConfig& c, const GpuInfo& gpu) {
  const bool is_window = p.mask.left >= 0 && p.mask.right >= 0 && p.mask.prefix == 0;
  const int64_t reach = is_window ? p.mask.left + p.mask.right + c.keys() : p.q_len;
  const int64_t rows = p.head_q / p.head_kv * std::min(p.q_len, reach);
  const int64_t blocks = p.batch * p.head_kv * ceil_div(p.kv_len, c.keys());
  return rows >= kLeastRows * gpu.sm_count && p.kv_len >= kLeastKeys * gpu.sm_count &&
         kLeastShare * blocks >= gpu.sm_count;
}

}  // namespace

const BackwardKernel* find_backward(const AttentionProblem& p, const GpuInfo& gpu) {
  const bool sums_fit = p.head_q == p.head_kv || p.q_len % BackwardConfig::kSumRows == 0;
  if (!sums_fit || p.softcap > 0 || p.layout == Layout::kPacked ||
      p.determinism == Determinism::kRequired) {
    return nullptr;
  }
  for (const BackwardKernel* kernel : backward_kernels()) {
    const BackwardConfig& c = kernel->config;
    if (kernel->dtype != p.dtype || p.dim_qk != c.dim || p.dim_v != c.dim) continue;
    const bool is_short = cuda::cut_backward(p, blocks_of(c, p, gpu), gpu).one_launch;
    if (!is_short && pays(p, c, gpu)) return kernel;
  }
  return nullptr;
}

cuda::BackwardConfig blocks_of(const BackwardConfig& c, const AttentionProblem& p,
                               const GpuInfo& gpu) {
  cuda::BackwardConfig blocks = cuda::find_backward(p, gpu)->one_pass;
  blocks.key_warps = 4 * c.warpgroups;
  blocks.key_m_tiles = c.key_tiles;
  blocks.key_tile_q = c.rows();
  blocks.key_blocks = 1;
  blocks.of_part = 700;  // H200
  return blocks;
}

}  // namespace fovea::cuda::hopper
