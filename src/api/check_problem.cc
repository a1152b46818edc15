// Whether an AttentionProblem makes sense in itself, whatever engine is to run it.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "api/check.h"
#include "base/checked.h"
#include "base/refusal.h"

namespace fovea {
namespace {

constexpr const char* kMakePlan = "make_plan";
constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

struct NamedSize {
  const char* name;
  int64_t value;
};

struct NamedFeature {
  Feature feature;
  const char* name;
};
constexpr NamedFeature kFeatures[] = {{Feature::kBias, "bias"},
                                      {Feature::kBoolMask, "mask"},
                                      {Feature::kKeyLengths, "key_lengths"},
                                      {Feature::kAlibi, "alibi_slopes"},
                                      {Feature::kSink, "sink"}};

std::string feature_text(Feature features) {
  std::string text;
  auto rest = static_cast<uint32_t>(features);
  for (const NamedFeature& known : kFeatures) {
    if (!has(features, known.feature)) continue;
    rest &= ~static_cast<uint32_t>(known.feature);
    text.append(text.empty() ? "" : " | ").append(known.name);
  }
  if (rest == 0) return text.empty() ? "none" : text;
  return text.append(text.empty() ? "" : " | ").append("bits ").append(std::to_string(rest));
}

Status check_enums(const AttentionProblem& p) {
  switch (p.dtype) {
    case DType::kF32:
    case DType::kF16:
    case DType::kBf16:
    case DType::kF64: break;
    default: return refuse(kMakePlan, "dtype", show(p.dtype), must("be f32, f16, bf16 or f64"));
  }
  uint32_t known = 0;
  for (const NamedFeature& feature : kFeatures) known |= static_cast<uint32_t>(feature.feature);
  if ((static_cast<uint32_t>(p.features) & ~known) != 0) {
    return refuse(kMakePlan, "features", feature_text(p.features),
                  must("be a combination of bias, mask, key_lengths, alibi_slopes and sink"));
  }
  // Enums that came through the C API, or a cast, can hold anything.
  if (p.layout != Layout::kDense && p.layout != Layout::kPacked) {
    return refuse(kMakePlan, "layout", show(static_cast<int64_t>(p.layout)),
                  must("be kDense (0) or kPacked (1)"));
  }
  if (p.determinism != Determinism::kAny && p.determinism != Determinism::kRequired) {
    return refuse(kMakePlan, "determinism", show(static_cast<int64_t>(p.determinism)),
                  must("be kAny (0) or kRequired (1)"));
  }
  if (p.tf32 != Tf32::kForbidden && p.tf32 != Tf32::kAllowed) {
    return refuse(kMakePlan, "tf32", show(static_cast<int64_t>(p.tf32)),
                  must("be kForbidden (0) or kAllowed (1)"));
  }
  return {};
}

Status check_sizes(const AttentionProblem& p) {
  for (const auto& [name, value] :
       {NamedSize{"batch", p.batch}, NamedSize{"q_len", p.q_len}, NamedSize{"kv_len", p.kv_len}}) {
    if (value < 0) return refuse(kMakePlan, name, show(value), must_be_at_least(0));
  }
  for (const auto& [name, value] : {NamedSize{"head_q", p.head_q}, NamedSize{"head_kv", p.head_kv},
                                    NamedSize{"dim_qk", p.dim_qk}, NamedSize{"dim_v", p.dim_v}}) {
    if (value < 1) return refuse(kMakePlan, name, show(value), must_be_at_least(1));
  }
  if (p.head_q % p.head_kv != 0) {
    return refuse(kMakePlan, "head_q", show(p.head_q),
                  must("be a multiple of head_kv = " + show(p.head_kv)));
  }
  return {};
}

// The bytes of every tensor, and of its f64 twin in an engine's workspace, fit in 63 bits. Lengths
// of 0 count as 1, so that no loop bound made of the other sizes can overflow either.
Status check_extent(const char* name, int64_t batch, int64_t len, int64_t head, int64_t dim) {
  const auto bytes = checked_product(
      {std::max<int64_t>(batch, 1), std::max<int64_t>(len, 1), head, dim, int64_t{sizeof(double)}});
  if (bytes) return {};
  return refuse(kMakePlan, name,
                show(batch) + " x " + show(len) + " x " + show(head) + " x " + show(dim),
                must("take less than 2^63 bytes as f64"));
}

Status check_extents(const AttentionProblem& p) {
  const int64_t dim = std::max(p.dim_qk, p.dim_v);
  if (Status s = check_extent("batch x q_len x head_q x dim", p.batch, p.q_len, p.head_q, dim);
      !s.ok()) {
    return s;
  }
  return check_extent("batch x kv_len x head_kv x dim", p.batch, p.kv_len, p.head_kv, dim);
}

Status check_layout(const AttentionProblem& p) {
  struct Total {
    const char* name;
    int64_t value;
    const char* longest_name;
    int64_t longest;
  };
  for (const Total& total : {Total{"total_q", p.total_q, "q_len", p.q_len},
                             Total{"total_kv", p.total_kv, "kv_len", p.kv_len}}) {
    if (p.layout == Layout::kDense) {
      if (total.value == 0) continue;
      return refuse(kMakePlan, total.name, show(total.value), must("be 0 in the dense layout"));
    }
    if (total.value < 0) {
      return refuse(kMakePlan, total.name, show(total.value), must_be_at_least(0));
    }
    if (total.value > kMaxInt32) {
      return refuse(kMakePlan, total.name, show(total.value),
                    must("be at most 2147483647, the largest value of cu_seqlens"));
    }
    const int64_t most = p.batch * total.longest;  // fits: check_extents
    if (total.value > most) {
      return refuse(
          kMakePlan, total.name, show(total.value),
          must("be at most batch * " + std::string(total.longest_name) + " = " + show(most)));
    }
  }
  if (p.layout == Layout::kPacked && has(p.features, Feature::kKeyLengths)) {
    return refuse(kMakePlan, "features", feature_text(p.features),
                  must("not hold key_lengths in the packed layout: cu_seqlens_kv gives them"));
  }
  return {};
}

Status check_mask(const Mask& mask) {
  for (const auto& [name, value] :
       {NamedSize{"mask.left", mask.left}, NamedSize{"mask.right", mask.right}}) {
    if (value < Mask::kUnbounded) {
      return refuse(kMakePlan, name, show(value), must("be at least 0, or -1 for unbounded"));
    }
  }
  if (mask.prefix < 0) {
    return refuse(kMakePlan, "mask.prefix", show(mask.prefix), must_be_at_least(0));
  }
  return {};
}

Status check_scalars(const AttentionProblem& p) {
  if (p.scale && !std::isfinite(*p.scale)) {
    return refuse(kMakePlan, "scale", show(*p.scale), must("be finite"));
  }
  if (!std::isfinite(p.softcap) || p.softcap < 0) {
    return refuse(kMakePlan, "softcap", show(p.softcap), must("be finite and at least 0"));
  }
  if (!(p.dropout >= 0 && p.dropout < 1)) {
    return refuse(kMakePlan, "dropout", show(p.dropout), must("be in [0, 1)"));
  }
  if (p.logit_bound && !(std::isfinite(*p.logit_bound) && *p.logit_bound > 0)) {
    return refuse(kMakePlan, "logit_bound", show(*p.logit_bound), must("be finite and above 0"));
  }
  return {};
}

}  // namespace

Status check_problem(const AttentionProblem& p) {
  if (Status s = check_enums(p); !s.ok()) return s;
  if (Status s = check_sizes(p); !s.ok()) return s;
  if (Status s = check_extents(p); !s.ok()) return s;
  if (Status s = check_layout(p); !s.ok()) return s;
  if (Status s = check_mask(p.mask); !s.ok()) return s;
  return check_scalars(p);
}

}  // namespace fovea
