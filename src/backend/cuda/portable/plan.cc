// The choice of kernels and cuts.
#include "backend/cuda/portable/plan.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <span>

#include "backend/cuda/common/exponents.h"
#include "backend/sequence.h"

namespace fovea::cuda {
namespace {

constexpr int64_t kMaxParts = 64;
constexpr int64_t kSplitBlocks = 2;        // of an SM, that keys are cut for
constexpr int64_t kLeastSplitKeys = 1024;  // below it a merge takes longer than the keys
constexpr int64_t kFewKeys = 1024;         // that a block of few rows may read for them alone
constexpr int64_t kFewRows = 64;           // of a KV head, for which keys are read about once
constexpr int64_t kSharedBlocks = 2;       // of an SM, whose warps share rows
constexpr int kEarlySm = 90;               // with launches that begin early
constexpr int64_t kCrowdedWaves = 3;       // of blocks, beyond which one more to an SM pays
constexpr int64_t kManyWaves = 8;          // of blocks: enough that the last one hardly matters
constexpr int64_t kMostSums = 2;           // of L2 caches, that its sums of all heads may fill
constexpr int64_t kLeastRowTiles = 2;      // of a part of the rows that a tile of keys meets
constexpr int64_t kSmallRowTiles = 64;     // the same with small heads, where the GPU is full
constexpr int64_t kEvenLength = 115;       // percent of the mean: the longest of even blocks
constexpr int64_t kLongRows = 4096;        // of a head, that have larger tiles if not evenly cut
// What one launch that does all may have for an SM: keys, rows, scores times the head dim.
constexpr int64_t kShortKeys = 128, kShortRows = 1024, kShortWork = 5 << 18;
constexpr double kLeastScale = 1e-6;  // that a term is divided by

// What scores need besides a positive scale and a range of visible keys.
Terms terms_of(const AttentionProblem& p) {
  const bool cap = p.softcap > 0, alibi = has(p.features, Feature::kAlibi);
  const bool bias = has(p.features, Feature::kBias), mask = has(p.features, Feature::kBoolMask);
  const int count = int{cap} + int{alibi} + int{bias} + int{mask};
  if (p.dropout > 0 || !(scale_of(p) > 0) || count > 1) return Terms::kAny;
  if (count == 0) return Terms::kNone;
  // What is added comes divided by the scale.
  if (scale_of(p) < kLeastScale || scale_of(p) > 1 / kLeastScale) return Terms::kAny;
  return bias ? Terms::kBias : mask ? Terms::kMask : Terms::kComputed;
}

// Floats are multiplied exactly unless the caller allows tf32.
Products products_of(const AttentionProblem& p) {
  if (takes_tf32(p)) return Products::kTf32;
  return p.dtype == DType::kF32 ? Products::kExact : Products::kHalf;
}

template <typename Config>
int padded_dims(const Config& c) {
  return c.dim_qk + c.dim_v;
}

// Whether weights may refer to 0, where keys are not cut into parts; and, then, whether products
// are exponents.
bool is_bounded(const AttentionProblem& p) {
  return p.logit_bound && *p.logit_bound <= kMostLogitBound && !has(p.features, Feature::kSink);
}
bool is_of_exponents(const AttentionProblem& p) {
  return is_bounded(p) && products_are_exponents(scale_of(p));
}

// The smallest instance that holds the head dims, of those that suit; null where there is none.
template <typename Kernel, typename Suits>
const Kernel* find_instance(std::span<const Kernel* const> table, const AttentionProblem& p,
                            Terms terms, Suits suits) {
  const Kernel* best = nullptr;
  for (const Kernel* kernel : table) {
    const auto& c = kernel->config;
    if (kernel->dtype != p.dtype || c.products != products_of(p)) continue;
    if (c.terms != terms || !suits(c)) continue;
    if (c.dim_qk < p.dim_qk || c.dim_v < p.dim_v) continue;
    if (best == nullptr || padded_dims(c) < padded_dims(best->config)) best = kernel;
  }
  return best;
}

// Few dims have kernels of their own for one term alone; one that is a third too large still is
// faster than that of all terms.
template <typename Kernel>
bool serves(const Kernel* one, const Kernel* any) {
  return one != nullptr && any != nullptr &&
         3 * padded_dims(one->config) <= 4 * padded_dims(any->config);
}

// Tiles take rows through the heads of a group, unless a head nearly fills them: rows of two heads
// see different keys.
bool tiles_of_heads(const AttentionProblem& p, const ForwardConfig& c) {
  return 2 * p.q_len > c.tile_q();
}
int64_t row_tiles(const AttentionProblem& p, const ForwardConfig& c) {
  const int64_t group = p.head_q / p.head_kv;
  return tiles_of_heads(p, c) ? group * ceil_div(p.q_len, c.tile_q())
                              : ceil_div(group * p.q_len, c.tile_q());
}

// Whether two runs have to give the same bits.
bool repeats(const AttentionProblem& p) { return p.determinism == Determinism::kRequired; }

// Whether one pass may do all of backward: in the kernels of all terms blocks can add in turn.
bool takes_one_pass(const AttentionProblem& p, const BackwardConfig& c, const GpuInfo& gpu) {
  return c.one_pass() && (c.terms == Terms::kAny || !repeats(p)) &&
         c.key_shared_bytes() + kOwnSharedBytes <= gpu.shared_bytes;
}

// Whether a problem is over so soon that what is computed twice takes less than a second launch.
bool is_short(const AttentionProblem& p, int dim, int64_t sm_count) {
  const int64_t keys = p.batch * p.head_kv * p.kv_len, rows = p.batch * p.head_q * p.q_len;
  if (keys > kShortKeys * sm_count || rows > kShortRows * sm_count) return false;
  const int64_t scores = rows * p.kv_len / (p.mask.right >= 0 ? 2 : 1);
  return scores * dim <= kShortWork * sm_count;
}

// What the rows of tiles of keys take when they are cut into parts: in rows that a block works on,
// one after another (H200).
struct RowCut {
  double rows;   // of a KV head
  double seen;   // at most, by a tile of keys
  double mean;   // on average
  double tail;   // of the longest block, for which others wait at the end
  double waves;  // of blocks with all their rows

  double of_sums, of_part;  // of a wave, where parts add to sums in memory

  double cost(int64_t count) const {
    const auto parts = static_cast<double>(count);
    const double longest = std::min(seen, rows / parts);
    double steps = std::max(longest, waves * mean + tail * longest);
    if (mean == rows) steps = std::ceil(waves * parts) * longest;  // equal blocks come in waves
    return count == 1 ? steps : steps + waves * (of_sums + of_part * parts);
  }
};

RowCut row_cut(const AttentionProblem& p, const BackwardConfig& c, double waves,
               bool longest_first) {
  const int64_t group = p.head_q / p.head_kv;
  RowCut cut{};
  cut.rows = static_cast<double>(group * p.q_len);
  cut.seen = cut.mean = cut.rows;
  if (p.mask.right >= 0 && p.mask.left >= 0 && p.mask.prefix == 0) {
    const int64_t reach = std::min(p.q_len, p.mask.left + p.mask.right + c.key_tile());
    cut.seen = cut.mean = static_cast<double>(group * reach);
  } else if (p.mask.right >= 0) {
    cut.mean = cut.rows / 2;
  }
  cut.tail = longest_first ? 0.15 : 0.5;
  cut.waves = waves;
  cut.of_sums = c.of_sums;
  cut.of_part = c.of_part;
  return cut;
}

// Of every head, the rows that see some of the keys [begin, end) of the longest sequence.
int64_t rows_seeing(const AttentionProblem& p, int64_t begin, int64_t end) {
  const int64_t shift = p.kv_len - p.q_len;
  int64_t first = 0, last = p.q_len;
  if (p.mask.prefix <= begin) {
    if (p.mask.right >= 0) first = std::max(first, begin - p.mask.right - shift);
    if (p.mask.left >= 0) last = std::min(last, end + p.mask.left - shift);
  }
  return std::max<int64_t>(last - first, 0);
}

// As many blocks as run at once, each with about as many rows as the others; unless one would have
// many more, for whole tiles of keys are too few: then others that come later fill the gaps better.
void cut_evenly(const AttentionProblem& p, const BackwardConfig& c, int64_t at_once,
                BackwardCut& cut) {
  const int64_t heads = p.batch * p.head_kv;
  const auto tiles = static_cast<size_t>(ceil_div(p.kv_len, c.key_tile()));
  std::array<int64_t, EvenParts::kMostTiles> seen{};  // rows, by each tile of keys
  int64_t all = 0;
  for (size_t tile = 0; tile < tiles; ++tile) {
    const int64_t begin = static_cast<int64_t>(tile) * c.key_tile();
    const int64_t end = std::min(begin + c.key_tile(), p.kv_len);
    seen[tile] = p.head_q / p.head_kv * rows_seeing(p, begin, end);
    all += seen[tile];
  }
  const int64_t mean = std::max(heads * all / at_once, kLeastRowTiles * c.key_tile_q);
  EvenParts even{static_cast<int>(tiles), {}};
  int64_t most_parts = 1, longest = 0, rows = mean;  // rows: of a part
  for (int64_t block = at_once + 1; block > at_once; rows += c.key_tile_q / 8) {
    block = longest = 0;
    most_parts = 1;
    for (size_t tile = 0; tile < tiles; ++tile) {
      const int64_t parts = std::clamp<int64_t>((seen[tile] + rows / 2) / rows, 1, kMaxParts);
      longest = std::max(longest, seen[tile] / parts);
      most_parts = std::max(most_parts, parts);
      even.first_block[tile] = static_cast<int>(block);
      block += heads * parts;
    }
    even.first_block[tiles] = static_cast<int>(block);
  }
  if (most_parts == 1 || 100 * longest > kEvenLength * mean) return;
  cut.even = even;
  cut.row_parts = most_parts;
}

}  // namespace

// Warps share rows where there are so few that all blocks run at once, and each of them can afford
// to read its keys alone: they are few, or the rows of a KV head are.
const ForwardKernel* find_forward(const AttentionProblem& p, const GpuInfo& gpu) {
  const Terms terms = terms_of(p);
  const auto of_width = [&](Width width) {
    return find_instance(forward_kernels(), p, terms,
                         [&](const ForwardConfig& c) { return c.width == width; });
  };
  const ForwardKernel* wide = of_width(Width::kWide);
  if (is_one_term(terms)) {
    const ForwardKernel* const any =
        find_instance(forward_kernels(), p, Terms::kAny, [](const ForwardConfig&) { return true; });
    return serves(wide, any) ? wide : any;
  }
  if (wide == nullptr) return nullptr;
  // Of the same dims; null where there is none.
  const auto beside_wide = [&](Width width) {
    const ForwardKernel* const kernel = of_width(width);
    const bool same = kernel != nullptr && kernel->config.dim_qk == wide->config.dim_qk;
    return same ? kernel : nullptr;
  };
  const auto waves = [&](const ForwardKernel& kernel, int64_t blocks_of_sm) {
    const int64_t blocks = row_tiles(p, kernel.config) * p.batch * p.head_kv;
    return ceil_div(blocks, blocks_of_sm * gpu.sm_count);
  };
  // Of exponents one more block to an SM is worth it with few of them too.
  if (const ForwardKernel* const crowded = beside_wide(Width::kCrowded); crowded != nullptr) {
    if (waves(*crowded, crowded->config.blocks) > kCrowdedWaves) return crowded;
    if (is_of_exponents(p) && waves(*crowded, 1) > 1) wide = crowded;
  }
  const int64_t rows = p.head_q / p.head_kv * p.q_len;
  if (p.kv_len > kFewKeys && rows > kFewRows) return wide;
  for (const Width width : {Width::kQuads, Width::kPairs}) {
    const ForwardKernel* const shared = beside_wide(width);
    if (shared != nullptr && waves(*shared, kSharedBlocks) <= 1) return shared;
  }
  return wide;
}

const BackwardKernel* find_backward(const AttentionProblem& p, const GpuInfo& gpu) {
  const Terms terms = terms_of(p);
  const auto of_terms = [&](Terms which) {
    return find_instance(backward_kernels(), p, which, [](const BackwardConfig&) { return true; });
  };
  if (!is_one_term(terms)) return of_terms(terms);
  const BackwardKernel* const one = of_terms(terms);
  const BackwardKernel* const any = of_terms(Terms::kAny);
  return serves(one, any) && takes_one_pass(p, one->one_pass, gpu) ? one : any;
}

ForwardCut cut_forward(const AttentionProblem& p, const ForwardConfig& c, const GpuInfo& gpu) {
  ForwardCut cut;
  cut.tiles = row_tiles(p, c);
  const int64_t blocks = std::max<int64_t>(1, cut.tiles * p.batch * p.head_kv);
  const int64_t key_tiles = std::max<int64_t>(1, ceil_div(p.kv_len, c.tile_kv));
  // A long block at the end would leave the others idle. But with many blocks, and keys of all
  // heads that do not stay in the L2 cache, those of one head that run together find its keys
  // there.
  const int64_t keys = p.head_kv * (p.layout == Layout::kPacked ? p.total_kv : p.batch * p.kv_len);
  const bool cached = 2 * keys * padded_dims(c) * element_bytes(c.products) <= gpu.l2_bytes;
  cut.longest_first =
      p.mask.right >= 0 && (cached || blocks <= kManyWaves * c.blocks * gpu.sm_count);
  const int64_t wanted = kSplitBlocks * gpu.sm_count;
  if (blocks * 2 <= wanted && p.kv_len >= kLeastSplitKeys) {
    // A part of fewer than four tiles spends more on its start and the merge than it saves.
    cut.parts = std::clamp<int64_t>(std::min(wanted / blocks, key_tiles / 4), 1, kMaxParts);
  }
  const int64_t tiles_of_part = ceil_div(key_tiles, cut.parts);
  cut.part_keys = tiles_of_part * c.tile_kv;
  cut.parts = ceil_div(key_tiles, tiles_of_part);
  return cut;
}

BackwardCut cut_backward(const AttentionProblem& p, const BackwardConfig& c, const GpuInfo& gpu) {
  constexpr int64_t kTile = BackwardConfig::kSumTile;
  BackwardCut cut;
  cut.one_launch = c.small_heads && is_short(p, c.dim_qk, gpu.sm_count);
  cut.one_pass = takes_one_pass(p, c, gpu);
  if (!cut.one_pass) return cut;
  const bool packed = p.layout == Layout::kPacked;
  const auto sum_rows = [&](int64_t rows) { return p.head_kv * (rows / kTile + p.batch) * kTile; };
  const int64_t group = p.head_q / p.head_kv;
  cut.query_sum_rows = sum_rows(group * (packed ? p.total_q : p.batch * p.q_len));
  if (repeats(p)) {  // in whole 16 bytes
    cut.turns = ceil_div(1 + cut.query_sum_rows / c.key_tile_q * c.key_warps, 4) * 4;
  }
  // The longest first, that none is left over at the end; but heads one after another where not all
  // their sums stay in the cache, or with larger heads where far from all do.
  const bool weighed = c.of_part > 0;
  cut.keys_begin_early = c.dq_of_products;  // of heads of 16, where it was measured
  const int64_t sum_bytes = cut.query_sum_rows * c.dim_qk * int64_t{sizeof(float)};
  const int64_t most_bytes = weighed ? kMostSums * gpu.l2_bytes : c.small_heads ? gpu.l2_bytes : 0;
  cut.first_keys_first = p.mask.right >= 0 && sum_bytes <= most_bytes && cut.turns == 0;
  const int64_t blocks =
      std::max<int64_t>(1, p.batch * p.head_kv * ceil_div(p.kv_len, c.key_tile()));
  const int64_t tiles_of_rows = ceil_div(group * p.q_len, c.key_tile_q);
  const int64_t wanted = int64_t{c.key_blocks} * gpu.sm_count;
  // A part of fewer tiles than that spends more on its start than it saves.
  int64_t most = std::min(tiles_of_rows / kLeastRowTiles, kMaxParts);
  if (cut.turns > 0) most = 1;  // parts add to sums of dk and dv, in any order
  if (weighed) {
    const double waves = static_cast<double>(blocks) / static_cast<double>(wanted);
    const RowCut rows = row_cut(p, c, waves, cut.first_keys_first);
    for (int64_t parts = 2; parts <= most; ++parts) {
      if (rows.cost(parts) < rows.cost(cut.row_parts)) cut.row_parts = parts;
    }
  } else if (blocks <= kManyWaves * wanted) {
    // With small heads a tile takes so little that parts are short only to fill the GPU.
    const int64_t enough = tiles_of_rows / kSmallRowTiles, filling = ceil_div(wanted, blocks);
    if (c.small_heads) most = std::min(most, std::max(enough, filling));
    cut.row_parts =
        std::clamp<int64_t>(std::min(ceil_div(kManyWaves * wanted, blocks), most), 1, kMaxParts);
    if (c.dq_of_products && cut.row_parts > enough && blocks <= wanted &&
        p.kv_len <= int64_t{EvenParts::kMostTiles} * c.key_tile()) {
      cut_evenly(p, c, wanted, cut);
    }
  }
  const int64_t long_bytes = c.of_long_tiles().key_shared_bytes() + kOwnSharedBytes;
  cut.long_tiles = c.long_tile_q > 0 && p.q_len >= kLongRows && cut.even.tiles == 0 &&
                   c.key_blocks * long_bytes <= gpu.shared_bytes;
  if (cut.row_parts > 1) cut.key_sum_rows = sum_rows(packed ? p.total_kv : p.batch * p.kv_len);
  return cut;
}

ForwardArguments plan_forward(const AttentionProblem& p, const ForwardConfig& c,
                              const ForwardCut& cut, const GpuInfo& gpu) {
  ForwardArguments a{};
  a.shared_bytes = c.shared_bytes();
  // What is over in a few microseconds waits for its launch nearly as long. Blocks that come early
  // find SMs unevenly busy: they ask for so much memory that no SM takes more than its share.
  if (c.key_warps > 1 && gpu.sm >= kEarlySm) {
    const int share = gpu.shared_bytes / static_cast<int>(kSharedBlocks) - 2 * kOwnSharedBytes;
    a.shared_bytes = std::max(a.shared_bytes, share);
  }
  a.batch = static_cast<int>(p.batch);
  a.longest_first = cut.longest_first;
  // One round for all where the order of blocks does not matter, or SMs take the next as they can.
  const int64_t blocks = cut.tiles * p.batch * p.head_kv;
  const bool at_once = blocks * cut.parts <= int64_t{c.blocks} * gpu.sm_count;
  a.of_round = Divider::by(cut.longest_first && at_once ? gpu.sm_count : blocks);
  a.bounded = is_bounded(p) && cut.parts == 1;
  a.products_are_exponents = a.bounded && is_of_exponents(p);
  a.tiles_of_heads = tiles_of_heads(p, c);
  a.of_heads = Divider::by(p.batch * p.head_kv);
  a.of_head_kv = Divider::by(p.head_kv);
  a.of_tiles = Divider::by(cut.tiles);
  a.of_group = Divider::by(p.head_q / p.head_kv);
  a.parts.count = static_cast<int>(cut.parts);
  a.part_keys = static_cast<int>(cut.part_keys);
  return a;
}

BackwardArguments plan_backward(const AttentionProblem& p, const BackwardCut& cut,
                                const GpuInfo& gpu) {
  BackwardArguments a{};
  a.batch = static_cast<int>(p.batch);
  a.stat_rows = p.layout == Layout::kPacked ? p.total_q : p.q_len;
  a.row_parts = static_cast<int>(cut.row_parts);
  a.even = cut.even;
  a.of_parts = Divider::by(cut.row_parts);
  a.of_heads = Divider::by(p.batch * p.head_kv);
  a.of_head_kv = Divider::by(p.head_kv);
  a.of_q_len = Divider::by(p.q_len);
  a.of_head_q = Divider::by(p.head_q);
  a.of_group = Divider::by(p.head_q / p.head_kv);
  a.one_launch = cut.one_launch;
  a.sm_count = gpu.sm_count;
  a.first_keys_first = cut.first_keys_first;
  a.long_tiles = cut.long_tiles;
  a.keys_begin_early = cut.keys_begin_early;
  return a;
}

}  // namespace fovea::cuda
