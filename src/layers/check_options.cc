// Refusals of options, worded as the operator's.
#include "layers/check_options.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "base/checked.h"
#include "base/refusal.h"

namespace fovea::layers {
namespace {

constexpr const char* kCall = "make_layer";
constexpr int64_t kMostTokens = std::numeric_limits<int32_t>::max();  // key lengths are i32

}  // namespace

void OptionCheck::is(bool right, std::string_view name, std::string_view value,
                     std::string_view must_what) {
  if (ok() && !right) status_ = refuse(kCall, name, value, must(must_what));
}

void OptionCheck::at_least(const char* name, int64_t value, int64_t least) {
  if (ok() && value < least) status_ = refuse(kCall, name, show(value), must_be_at_least(least));
}

void OptionCheck::multiple(const char* name, int64_t value, const char* of_name, int64_t of) {
  if (ok() && (of == 0 || value % of != 0)) {
    status_ = refuse(kCall, name, show(value),
                     must("be a multiple of " + std::string(of_name) + " = " + show(of)));
  }
}

void OptionCheck::finite(const char* name, double value) {
  is(std::isfinite(value), name, show(value), "be finite");
}

void OptionCheck::extent(const char* name, std::initializer_list<int64_t> sizes) {
  if (!ok()) return;
  const auto elements = checked_product(sizes);
  if (elements && *elements < int64_t{1} << 57) return;
  std::string text;
  for (const int64_t size : sizes) text += (text.empty() ? "" : " x ") + show(size);
  is(false, name, text, "take less than 2^60 bytes as f64");
}

void OptionCheck::dtype(DType dtype) {
  const bool known =
      dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBf16 || dtype == DType::kF64;
  if (ok() && !known) {
    status_ = refuse(kCall, "dtype", show(dtype), must("be f32, f16, bf16 or f64"));
  }
}

void OptionCheck::shape(const LayerShape& shape, int64_t max_seq_len) {
  at_least("shape.batch", shape.batch, 0);
  at_least("shape.q_len", shape.q_len, 0);
  is(shape.kv_len >= 0 || shape.kv_len == LayerShape::kAsQuery, "shape.kv_len", show(shape.kv_len),
     "be at least 0, or kAsQuery (-1)");
  at_least("max_seq_len", max_seq_len, 0);
  const bool known = shape.use == LayerUse::kInference || shape.use == LayerUse::kTraining ||
                     shape.use == LayerUse::kCached;
  is(known, "shape.use", show(static_cast<int64_t>(shape.use)),
     "be kInference (0), kTraining (1) or kCached (2)");
  if (shape.use != LayerUse::kCached) return;
  const int64_t tokens = std::max(shape.q_len, shape.kv_len);
  is(max_seq_len >= tokens && max_seq_len > 0 && max_seq_len <= kMostTokens, "max_seq_len",
     show(max_seq_len),
     "be in " + show(std::max<int64_t>(1, tokens)) + "..2147483647 for a cache: a call adds " +
         show(tokens) + " tokens");
}

void OptionCheck::attends_to_itself(const LayerShape& shape) {
  is(shape.kv_len == LayerShape::kAsQuery || shape.kv_len == shape.q_len, "shape.kv_len",
     show(shape.kv_len),
     "be kAsQuery (-1) or q_len = " + show(shape.q_len) + ": this layer attends to query itself");
}

void OptionCheck::channels(const char* name, int64_t value, int64_t least) {
  constexpr int64_t kMost = INT32_MAX;
  is(value >= least && value <= kMost, name, show(value),
     "be in " + show(least) + ".." + show(kMost));
}

void OptionCheck::rope(const RopeOptions& rope, int64_t dim) {
  is(rope.style == RopeStyle::kHalf || rope.style == RopeStyle::kInterleaved, "rope.style",
     show(static_cast<int64_t>(rope.style)), "be kHalf (0) or kInterleaved (1)");
  is(std::isfinite(rope.base) && rope.base > 0, "rope.base", show(rope.base),
     "be finite and above 0");
  is(rope.fraction > 0 && rope.fraction <= 1, "rope.fraction", show(rope.fraction), "be in (0, 1]");
  if (!ok()) return;
  const int64_t turning = turning_channels(rope, dim);
  is(turning >= 2 && turning % 2 == 0, "rope.fraction", show(rope.fraction),
     "turn an even number of channels, 2 or more: of " + show(dim) + " it turns " + show(turning));
}

void OptionCheck::window(int64_t sliding_window) {
  is(sliding_window >= 0, "sliding_window", show(sliding_window), "be at least 1, or 0 for none");
}

void OptionCheck::scale(const std::optional<double>& softmax_scale) {
  if (softmax_scale) finite("softmax_scale", *softmax_scale);
}

void OptionCheck::common(const LayerOptions& o, const LayerShape& sizes) {
  dtype(o.dtype);
  at_least("embed_dim", o.embed_dim, 1);
  at_least("num_heads", o.num_heads, 1);
  shape(sizes, o.max_seq_len);
  window(o.sliding_window);
  scale(o.softmax_scale);
  is(o.dropout >= 0 && o.dropout < 1, "dropout", show(o.dropout), "be in [0, 1)");
  is(o.position == Position::kNone || o.position == Position::kRope ||
         o.position == Position::kAlibi,
     "position", show(static_cast<int64_t>(o.position)), "be kNone (0), kRope (1) or kAlibi (2)");
  is(o.qk_norm == QkNorm::kNone || o.qk_norm == QkNorm::kRms || o.qk_norm == QkNorm::kLayer,
     "qk_norm", show(static_cast<int64_t>(o.qk_norm)), "be kNone (0), kRms (1) or kLayer (2)");
  is(std::isfinite(o.norm_eps) && o.norm_eps >= 0, "norm_eps", show(o.norm_eps),
     "be finite and at least 0");
}

int64_t turning_channels(const RopeOptions& rope, int64_t dim) {
  return static_cast<int64_t>(rope.fraction * static_cast<double>(dim) + 1e-9);
}

Mask mask_of(bool causal, int64_t sliding_window) {
  const int64_t reach = sliding_window > 0 ? sliding_window - 1 : Mask::kUnbounded;
  return Mask::window(reach, causal ? 0 : reach);
}

int64_t head_dim_of(const LayerOptions& o, OptionCheck& check) {
  check.channels("head_dim", o.head_dim, 0);
  if (!check.ok() || o.head_dim > 0) return o.head_dim;
  check.multiple("embed_dim", o.embed_dim, "num_heads", o.num_heads);
  if (!check.ok()) return 0;
  check.channels("embed_dim / num_heads", o.embed_dim / o.num_heads, 1);
  return o.embed_dim / o.num_heads;
}

LayerShape with_kv_len(const LayerShape& shape) {
  LayerShape full = shape;
  if (full.kv_len == LayerShape::kAsQuery) full.kv_len = full.q_len;
  return full;
}

}  // namespace fovea::layers
