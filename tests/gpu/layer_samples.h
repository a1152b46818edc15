// The layers that tests on a GPU are about, with weights that keep their results of normal size.
#pragma once

#include "layer_accuracy.h"

namespace fovea::test {

// Skips where the machine has no GPU, or there is no cuBLASLt to build or run with.
class DeviceLayers : public testing::Test {
 protected:
  void SetUp() override;
};

inline double weight_scale(int64_t fan_in) { return 1 / std::sqrt(static_cast<double>(fan_in)); }

struct GroupedSizes {
  int64_t batch, len, embed, heads, heads_kv, dim;
};
// Sizes that no vector divides, sizes that all do, and one KV head.
inline constexpr GroupedSizes kOdd{3, 37, 45, 6, 2, 18}, kEven{2, 130, 128, 8, 2, 32},
    kOneKv{2, 65, 64, 4, 1, 64};

using GroupedSample = LayerSample<FusedWeights, GroupedQueryOptions>;
GroupedSample grouped(const GroupedSizes& s, const std::function<void(GroupedQueryOptions&)>& set);

struct LatentDims {
  int64_t embed, heads, q_latent, kv_latent, nope, rope, v;  // rope 0: the simple form
};
inline constexpr LatentDims kSimple{48, 3, 24, 40, 16, 0, 16}, kDeepSeek{64, 3, 24, 40, 16, 8, 12},
    kOddDeepSeek{51, 5, 27, 33, 14, 6, 10};

using LatentSample = LayerSample<LatentWeights, LatentOptions>;
LatentSample latent(const LatentDims& s, const std::function<void(LatentOptions&)>& set);

using CcgqaSample = LayerSample<CcgqaWeights, CcgqaOptions>;
CcgqaSample ccgqa(const CcgqaOptions& options, int64_t batch, int64_t len);

}  // namespace fovea::test
