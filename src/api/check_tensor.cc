// Checks of one tensor, in the order in which a caller can understand them: shape before memory.
#include "api/check_tensor.h"

#include <string>
#include <utility>

#include "base/checked.h"
#include "base/refusal.h"

namespace fovea {
namespace {

std::string member(const TensorRule& rule, const char* name) {
  return std::string(rule.argument) + "." + name;
}

std::string stride_name(const TensorRule& rule, size_t dim) {
  return std::string(rule.argument) + ".strides[" + std::to_string(dim) + "]";
}

Status check_rank(const TensorView& t, const TensorRule& rule) {
  if (t.rank == rule.rank) return {};
  const bool nameless = t.rank < 0;  // from_dlpack met something that fovea has no name for
  return refuse(
      rule.call, member(rule, "rank"), show(int64_t{t.rank}),
      must("be " + std::to_string(rule.rank) +
           (nameless ? " (-1 is a view of a type, device or rank that fovea lacks)" : "")));
}

Status check_sizes(const TensorView& t, const TensorRule& rule) {
  for (int i = 0; i < rule.rank; ++i) {
    const auto at = static_cast<size_t>(i);
    const Dim& want = rule.dims[at];
    if (t.sizes[at] == want.size) continue;
    const bool may_be_one = rule.broadcast == Broadcast::kAllButLast && i + 1 < rule.rank;
    if (may_be_one && t.sizes[at] == 1) continue;
    const std::string origin = std::string(rule.origin) + "." + want.name;
    return refuse(rule.call, member(rule, want.name), show(t.sizes[at]),
                  may_be_one ? must("be 1 or " + origin + " = " + show(want.size))
                             : must_equal(origin, want.size));
  }
  return {};
}

Status check_dtype(const TensorView& t, const TensorRule& rule) {
  const auto [first, second] = rule.dtypes;
  if (t.dtype == first || t.dtype == second) return {};
  return refuse(rule.call, member(rule, "dtype"), show(t.dtype),
                must("be " + show(first) + (first == second ? "" : " or " + show(second))));
}

Status check_device(const TensorView& t, const TensorRule& rule) {
  // There is one CPU; an index given to it means nothing.
  const bool same = rule.device.type == DeviceType::kCpu ? t.device.type == DeviceType::kCpu
                                                         : t.device == rule.device;
  if (same) return {};
  return refuse(rule.call, member(rule, "device"), show(t.device), must("be " + show(rule.device)));
}

// No two elements share memory when each stride, from the smallest up, steps over all that the
// smaller ones reach. Exotic layouts that interleave without touching are refused too: no engine
// could tell them apart in time.
Status check_overlap(const TensorView& t, const TensorRule& rule) {
  // Dimensions of more than one element, by stride. An insertion at a time: there are four at most.
  std::array<size_t, TensorView::kMaxRank> order{};
  size_t count = 0;
  for (size_t dim = 0; dim < static_cast<size_t>(t.rank); ++dim) {
    if (t.sizes[dim] <= 1) continue;
    size_t place = count++;
    for (; place > 0 && t.strides[order[place - 1]] > t.strides[dim]; --place) {
      order[place] = order[place - 1];
    }
    order[place] = dim;
  }
  int64_t reach = 0;  // of the smaller strides together
  for (size_t n = 0; n < count; ++n) {
    const size_t at = order[n];
    if (t.strides[at] <= reach) {
      return refuse(
          rule.call, stride_name(rule, at), show(t.strides[at]),
          must("be above " + show(reach) + ": an output's elements may not share memory"));
    }
    reach += (t.sizes[at] - 1) * t.strides[at];  // fits: check_strides
  }
  return {};
}

Status check_strides(const TensorView& t, const TensorRule& rule) {
  int64_t reach = 0;  // elements from the first to the last
  for (int i = 0; i < t.rank; ++i) {
    const auto at = static_cast<size_t>(i);
    if (t.sizes[at] <= 1) continue;  // never stepped along: its stride may be anything
    if (t.strides[at] < 0) {
      return refuse(rule.call, stride_name(rule, at), show(t.strides[at]), must_be_at_least(0));
    }
    if (i + 1 == t.rank && rule.last_stride == LastStride::kOne && t.strides[at] != 1) {
      return refuse(rule.call, stride_name(rule, at), show(t.strides[at]),
                    must("be 1 in the last dimension"));
    }
    const auto step = checked_mul(t.sizes[at] - 1, t.strides[at]);
    const auto sum = step ? checked_add(reach, *step) : std::nullopt;
    const auto end = sum ? checked_add(*sum, 1) : std::nullopt;
    if (!end || !checked_mul(*end, dtype_bytes(t.dtype))) {
      return refuse(rule.call, stride_name(rule, at), show(t.strides[at]),
                    must("keep the tensor's extent under 2^63 bytes"));
    }
    reach = *sum;
  }
  return rule.access == Access::kWrite ? check_overlap(t, rule) : Status();
}

Status check_pointer(const TensorView& t, const TensorRule& rule) {
  if (t.data == nullptr) {
    return refuse(rule.call, member(rule, "data"), "null",
                  must("point to memory: the tensor has elements"));
  }
  const int64_t bytes = dtype_bytes(t.dtype);
  if (reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(bytes) != 0) {
    return refuse(rule.call, member(rule, "data"), show(static_cast<const void*>(t.data)),
                  must("be aligned to " + show(bytes) + " bytes"));
  }
  return {};
}

}  // namespace

bool has_elements(const TensorView& t) {
  for (int i = 0; i < t.rank; ++i) {
    if (t.sizes[static_cast<size_t>(i)] == 0) return false;
  }
  return t.rank > 0;
}

bool same_start(const TensorView& a, const TensorView& b) {
  return a.data == b.data && a.data != nullptr && has_elements(a) && has_elements(b);
}

Status check_tensor(const TensorView& t, const TensorRule& rule) {
  if (Status s = check_rank(t, rule); !s.ok()) return s;
  if (Status s = check_sizes(t, rule); !s.ok()) return s;
  if (Status s = check_dtype(t, rule); !s.ok()) return s;
  if (Status s = check_device(t, rule); !s.ok()) return s;
  if (!has_elements(t)) return {};  // no element, no memory to be wrong about
  if (Status s = check_strides(t, rule); !s.ok()) return s;
  return check_pointer(t, rule);
}

}  // namespace fovea
