// Checks of one call's tensors by the rules of the operator's.
#include "layers/check_call.h"

#include <cstdio>

#include "api/check.h"
#include "base/refusal.h"

namespace fovea::layers {

CallCheck::Name CallCheck::named(const char* name, const char* prefix) {
  Name both;
  std::snprintf(both.text.data(), both.text.size(), "%s%s", prefix, name);
  return both;
}

void CallCheck::remember(const Name& name, const TensorView& t, Access access) {
  const bool written = access == Access::kWrite;
  seen_[count_] = {name, t, written, written && lends_};
  if (count_ + 1 < kMost) ++count_;
}

void CallCheck::check(const char* name, const TensorView& t, Dims dims, Access access) {
  if (!ok()) return;
  const Name both = full(name);
  const char* const text = both.text.data();
  if (!t.given()) return note(refuse(call_, text, "not given", must_be_given()));
  TensorRule rule;
  rule.call = call_;
  rule.argument = text;
  rule.device = device_;
  rule.dtypes = {dtype_, dtype_};
  rule.origin = "layer";
  rule.access = access;
  rule.set_dims(dims);
  note(check_tensor(t, rule));
  if (ok() && access == Access::kWrite && lends_) check_lent(text, t);
  remember(both, t, access);
}

void CallCheck::check_lent(const char* name, const TensorView& t) {
  int64_t dense = 1;
  for (int i = t.elements() > 0 ? t.rank - 1 : -1; i >= 0; --i) {  // nothing lies anywhere
    const auto d = static_cast<size_t>(i);
    if (t.sizes[d] > 1 && t.strides[d] != dense) {
      return note(refuse(
          call_, std::string(name) + ".strides[" + std::to_string(i) + "]", show(t.strides[d]),
          must("be " + show(dense) + ": contiguous, for the plan's shape lends it")));
    }
    dense *= t.sizes[d];
  }
  if (reinterpret_cast<uintptr_t>(t.data) % kWorkspaceAlignment == 0) return;
  note(refuse(call_, std::string(name) + ".data", show(static_cast<const void*>(t.data)),
              must("be aligned to " + std::to_string(kWorkspaceAlignment) +
                   " bytes: the plan's shape lends it")));
}

void CallCheck::input(const char* name, const TensorView& t, Dims dims) {
  check(name, t, dims, Access::kRead);
}
void CallCheck::output(const char* name, const TensorView& t, Dims dims) {
  check(name, t, dims, Access::kWrite);
}

void CallCheck::weight(Weights kind, const char* name, const TensorView& t, Dims dims) {
  if (kind == Weights::kRead) return input(name, t, dims);
  optional_output(name, t, dims);
}

void CallCheck::dense_weight(Weights kind, const char* name, const TensorView& t, Dims dims) {
  weight(kind, name, t, dims);
  if (!ok() || !t.given()) return;
  const TensorView dense =
      TensorView::contiguous(t.data, t.dtype, {t.sizes[0], t.sizes[1], t.sizes[2]});
  for (size_t i = 0; i < 3; ++i) {
    if (t.sizes[i] <= 1 || t.strides[i] == dense.strides[i]) continue;
    note(refuse(call_, std::string(full(name).text.data()) + ".strides[" + std::to_string(i) + "]",
                show(t.strides[i]), must("be " + show(dense.strides[i]) + ": contiguous")));
  }
}

void CallCheck::qk_norm(Weights kind, QkNorm norm, int64_t head_dim, const QkNormWeights& w) {
  struct One {
    const char* name;
    const TensorView& view;
    bool shift;
  };
  for (const One& one : {One{"norm.q", w.q, false}, One{"norm.k", w.k, false},
                         One{"norm.q_bias", w.q_bias, true}, One{"norm.k_bias", w.k_bias, true}}) {
    if (norm == QkNorm::kNone) {
      absent(one.name, one.view, "qk_norm is kNone");
    } else if (one.shift && norm == QkNorm::kRms) {
      absent(one.name, one.view, "qk_norm is kRms, which has no bias");
    } else if (one.view.given()) {
      weight(kind, one.name, one.view, {{"head_dim", head_dim}});
    }
  }
}

void CallCheck::absent(const char* name, const TensorView& t, std::string_view why) {
  if (ok() && t.given()) note(refuse(call_, full(name).text.data(), "given", but(why)));
}

void CallCheck::mask(const TensorView& t, bool wanted, const LayerShape& shape, int64_t heads,
                     int64_t keys) {
  if (!wanted) return absent("mask", t, "the plan's shape has no mask");
  if (!ok()) return;
  if (!t.given()) return note(refuse(call_, "mask", "not given", but("the plan's shape has one")));
  TensorRule rule;
  rule.call = call_;
  rule.argument = "mask";
  rule.device = device_;
  rule.dtypes = {DType::kBool, DType::kBool};
  rule.origin = "layer";
  if (t.rank == 2) {
    rule.set_dims({{"batch", shape.batch}, {"keys", keys}});
  } else {
    rule.broadcast = Broadcast::kAllButLast;
    rule.set_dims(
        {{"batch", shape.batch}, {"num_heads", heads}, {"q_len", shape.q_len}, {"keys", keys}});
  }
  note(check_tensor(t, rule));
  remember(named("mask"), t, Access::kRead);
}

void CallCheck::positions(const char* name, const TensorView& t, int64_t batch, int64_t count) {
  if (!ok() || !t.given()) return;
  TensorRule rule;
  rule.call = call_;
  rule.argument = name;
  rule.device = device_;
  rule.dtypes = {DType::kI32, DType::kI32};
  rule.origin = "layer";
  rule.broadcast = Broadcast::kAllButLast;
  rule.last_stride = LastStride::kAny;
  rule.set_dims({{"batch", batch}, {"tokens", count}});
  note(check_tensor(t, rule));
  remember(named(name), t, Access::kRead);
}

void CallCheck::cache(const LayerCache* cache, const LayerShape& shape, int64_t max_seq_len) {
  if (!ok()) return;
  const int64_t tokens = shape.kv_len;
  if (shape.use != LayerUse::kCached) {
    if (cache == nullptr) return;
    return note(refuse(call_, "cache", "given", but("the plan's use is not kCached")));
  }
  if (cache == nullptr) {
    return note(refuse(call_, "cache", "not given", but("the plan's use is kCached")));
  }
  if (cache->length < 0 || cache->length > max_seq_len - tokens) {
    note(refuse(call_, "cache.length", show(cache->length),
                must("be in 0.." + show(max_seq_len - tokens) + ": max_seq_len = " +
                     show(max_seq_len) + ", and " + show(tokens) + " tokens are added")));
  }
}

void CallCheck::memory(Workspace workspace, size_t needed) {
  if (ok()) note(check_workspace(call_, workspace, needed));
}

void CallCheck::saved(Saved saved, size_t needed) {
  if (!ok() || needed == 0) return;
  if (saved.data == nullptr) {
    return note(
        refuse(call_, "saved.data", "null", must("point to " + std::to_string(needed) + " bytes")));
  }
  if (saved.bytes < needed) {
    return note(refuse(call_, "saved.bytes", std::to_string(saved.bytes),
                       must("be at least " + std::to_string(needed))));
  }
  if (reinterpret_cast<uintptr_t>(saved.data) % kWorkspaceAlignment != 0) {
    note(refuse(call_, "saved.data", show(static_cast<const void*>(saved.data)),
                must("be aligned to " + std::to_string(kWorkspaceAlignment) + " bytes")));
  }
}

namespace {

bool overlap(const TensorView& a, const TensorView& b) {
  const auto end_of = [](const TensorView& t) {
    int64_t last = 0;
    for (size_t i = 0; i < static_cast<size_t>(t.rank); ++i) {
      last += (t.sizes[i] - 1) * t.strides[i];
    }
    return static_cast<const std::byte*>(t.data) + (last + 1) * dtype_bytes(t.dtype);
  };
  return a.elements() > 0 && b.elements() > 0 && a.data < end_of(b) && b.data < end_of(a);
}

}  // namespace

Status CallCheck::finish() {
  for (size_t i = 0; ok() && i < count_; ++i) {
    for (size_t j = 0; ok() && j < count_; ++j) {
      const Seen &one = seen_[i], &other = seen_[j];
      if (i == j || !one.written) continue;
      const auto refused = [&](const std::string& rule, const char* why) {
        note(refuse(call_, std::string(one.name.text.data()) + ".data",
                    show(static_cast<const void*>(one.view.data)),
                    must(rule + other.name.text.data() + why)));
      };
      if (same_start(one.view, other.view)) {
        refused("not be that of ", "");
      } else if (one.lent && overlap(one.view, other.view)) {
        refused("not overlap ", ": the plan's shape lends it");
      }
    }
  }
  return status_;
}

}  // namespace fovea::layers
