// The choice of kernel and order.
#include "backend/cuda/hopper/forward/plan.h"

#include <algorithm>
#include <cmath>

#include "base/ceil_div.h"

namespace fovea::cuda::hopper {
namespace {

// What a row and key take with a kernel, to one of the fastest for its head dims: more warpgroups
// hide more of each other's softmax.
double slowness(const ForwardConfig& c) {
  if (c.warpgroups > 2) return 1.0;
  return c.dim_v <= 64 ? 1.18 : 1.1;  // H200
}
// What a tile takes besides, in keys.
constexpr double kTileKeys = 256;
// A part of fewer keys spends more on its start and the merge than it saves.
constexpr int64_t kLeastPartKeys = 1024;
constexpr int64_t kMostParts = 64;
// Blocks of keys an SM works on before a ticket pays for the kernel that clears it.
constexpr int64_t kTicketBlocks = 40;

// Whether rows see different numbers of keys.
bool unequal(const AttentionProblem& p) { return p.mask.right >= 0; }

// Where three or four warpgroups see different blocks, leaving some out gains more than turns do
// (H200, causal: head dim 64, 512 keys 152 -> 128 us, 4096 556 -> 536; 128, grouped heads, 4096 607
// -> 620 TFLOP/s; full, 64: 997 -> 1009 us).
bool takes_turns(const AttentionProblem& p, const ForwardConfig& c) {
  return !unequal(p) || c.warpgroups == 2;
}

// Whether a kernel is for problems of this size: resident ones are where no SM has a second tile.
bool is_for(const AttentionProblem& p, const ForwardConfig& c, const GpuInfo& gpu) {
  if (!c.resident) return true;
  const int64_t tiles = ceil_div(p.q_len, c.tile_q()) * p.head_q * p.batch;
  return tiles <= gpu.sm_count && p.kv_len <= c.stages * c.tile_kv;
}

// What a problem takes with a kernel, in rows times keys of one SM.
double cost(const AttentionProblem& p, const ForwardConfig& c, const GpuInfo& gpu) {
  if (c.resident) return 0;
  const int64_t row_tiles = ceil_div(p.q_len, c.tile_q()), heads = p.head_q * p.batch;
  const double tile_q = c.tile_q(),
               tiles_of_sm = static_cast<double>(row_tiles * heads) / gpu.sm_count;
  const auto kv_len = static_cast<double>(p.kv_len);
  // Equal tiles come in waves. Unequal ones fill gaps, but the longest has to be waited for.
  double keys = kv_len, tiles = tiles_of_sm;
  if (unequal(p)) {
    const double hidden = takes_turns(p, c) ? tile_q / 2 : 0.5 * kRowsOfWarpgroup;
    keys = std::max(kv_len - static_cast<double>(p.q_len) / 2, kv_len / 2) + hidden;
    tiles = std::max(tiles_of_sm, kv_len / keys);
  } else if (tiles_of_sm < 4) {
    tiles = std::ceil(tiles_of_sm);
  }
  return tiles * tile_q * (keys + kTileKeys) * slowness(c);
}

const ForwardKernel* find_kernel(const AttentionProblem& p, const GpuInfo& gpu) {
  const ForwardKernel* best = nullptr;
  for (const ForwardKernel* kernel : forward_kernels()) {
    const ForwardConfig& c = kernel->config;
    if (kernel->dtype != p.dtype || c.capped != (p.softcap > 0)) continue;
    if (c.dim_qk < p.dim_qk || c.dim_v < p.dim_v || !is_for(p, c, gpu)) continue;
    if (best != nullptr) {
      const int dims = c.dim_qk + c.dim_v, best_dims = best->config.dim_qk + best->config.dim_v;
      if (dims > best_dims) continue;
      if (dims == best_dims && cost(p, c, gpu) >= cost(p, best->config, gpu)) continue;
    }
    best = kernel;
  }
  return best;
}

// Parts that the keys of few tiles are cut into, so that every SM has one.
int64_t parts_of_keys(const AttentionProblem& p, const ForwardConfig& c, int64_t tiles,
                      const GpuInfo& gpu) {
  if (!c.takes_parts() || tiles == 0) return 1;
  const int64_t most = p.kv_len / kLeastPartKeys;
  return std::clamp<int64_t>(std::min(gpu.sm_count / tiles, most), 1, kMostParts);
}

// Heads whose K and V stay in the cache while a section is worked on (H200, causal, head dim 128:
// two thirds of it instead of one took 2.8 % less time at 512 keys, 1.3 at 1024, 1.6 at 4096, 2.2
// at 16k; head dim 64 and grouped heads alike).
int64_t section_heads(const AttentionProblem& p, const GpuInfo& gpu) {
  if (!unequal(p)) return 1;
  const int64_t bytes = p.kv_len * (p.dim_qk + p.dim_v) * int64_t{2} / (p.head_q / p.head_kv);
  const int64_t fit = 2 * gpu.l2_bytes / 3 / std::max<int64_t>(1, bytes);
  // A power of two, that most numbers of heads are divided without a rest.
  int64_t heads = 1;
  while (2 * heads <= fit && heads < p.batch * p.head_q) heads *= 2;
  return heads;
}

}  // namespace

ForwardPlan plan_forward(const AttentionProblem& p, const GpuInfo& gpu) {
  ForwardPlan plan;
  plan.kernel = find_kernel(p, gpu);
  if (plan.kernel == nullptr) return plan;
  const ForwardConfig& c = plan.kernel->config;
  const int64_t row_tiles = ceil_div(p.q_len, c.tile_q());
  const int64_t whole_tiles = row_tiles * p.head_q * p.batch;
  const int64_t key_blocks = std::max<int64_t>(1, ceil_div(p.kv_len, c.tile_kv));
  const int64_t part_blocks = ceil_div(key_blocks, parts_of_keys(p, c, whole_tiles, gpu));
  plan.part_keys = static_cast<int>(part_blocks * c.tile_kv);
  plan.parts = static_cast<int>(ceil_div(key_blocks, part_blocks));
  const int64_t tiles = whole_tiles * plan.parts;
  plan.row_tiles = static_cast<int>(row_tiles);
  plan.section_heads = static_cast<int>(section_heads(p, gpu));
  plan.blocks = static_cast<int>(std::min<int64_t>(tiles, gpu.sm_count));
  const bool uneven =
      unequal(p) || p.layout == Layout::kPacked || has(p.features, Feature::kKeyLengths);
  // Parts are one to a block, and have the workspace to themselves.
  plan.ticket =
      uneven && plan.parts == 1 && whole_tiles * key_blocks > kTicketBlocks * gpu.sm_count;
  plan.turns = takes_turns(p, c);
  return plan;
}

}  // namespace fovea::cuda::hopper
