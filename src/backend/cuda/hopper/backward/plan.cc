// The choice of the kernel.
#include "backend/cuda/hopper/backward/plan.h"

#include "backend/cuda/portable/plan.h"

namespace fovea::cuda::hopper {
namespace {

constexpr int64_t kSumRows = 16;    // that dq is added by
constexpr int64_t kLeastShare = 2;  // one multiprocessor in that many has keys of its own

}  // namespace

const BackwardKernel* find_backward(const AttentionProblem& p, const GpuInfo& gpu) {
  const bool sums_fit = p.head_q == p.head_kv || p.q_len % kSumRows == 0;
  if (!sums_fit || p.softcap > 0 || p.layout == Layout::kPacked ||
      p.determinism == Determinism::kRequired) {
    return nullptr;
  }
  for (const BackwardKernel* kernel : backward_kernels()) {
    const BackwardConfig& c = kernel->config;
    if (kernel->dtype != p.dtype || p.dim_qk != c.dim || p.dim_v != c.dim) continue;
    const int64_t blocks = p.batch * p.head_kv * ceil_div(p.kv_len, c.keys());
    const bool is_short = cuda::cut_backward(p, blocks_of(c, p, gpu), gpu).one_launch;
    if (!is_short && kLeastShare * blocks >= gpu.sm_count) return kernel;
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
