// Joins partial results over disjoint keys: each part weighs as much as its share of the softmax
// denominator, which its lse gives.
#include "backend/cuda/merge.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>

#include "api/check_tensor.h"
#include "api/guard.h"
#include "backend/cuda/device.h"
#include "base/half.h"
#include "base/refusal.h"

namespace fovea {
namespace {

constexpr const char* kMerge = "merge";

double load(double x) { return x; }
double load(float x) { return x; }
double load(Bf16 x) { return to_float(x); }
double load(F16 x) { return to_float(x); }

void store(double x, double& to) { to = x; }
void store(double x, float& to) { to = static_cast<float>(x); }
void store(double x, Bf16& to) { to = to_bf16(static_cast<float>(x)); }
void store(double x, F16& to) { to = to_f16(static_cast<float>(x)); }

// One query row of one head, as offsets in elements; packed results have no batch.
struct RowIndex {
  int64_t batch, row, head;
};

int64_t out_offset(const TensorView& t, RowIndex at) {
  if (t.rank == 3) return at.row * t.strides[0] + at.head * t.strides[1];
  return at.batch * t.strides[0] + at.row * t.strides[1] + at.head * t.strides[2];
}

int64_t lse_offset(const TensorView& t, RowIndex at) {
  if (t.rank == 2) return at.head * t.strides[0] + at.row * t.strides[1];
  return at.batch * t.strides[0] + at.head * t.strides[1] + at.row * t.strides[2];
}

template <typename Element, typename Lse>
class Merger {
 public:
  Merger(const PartialResult* parts, int64_t count, const TensorView& out, const TensorView& lse)
      : parts_(parts), count_(count), out_(out), lse_(lse) {}

  void run() const {
    const bool packed = out_.rank == 3;
    const int64_t batch = packed ? 1 : out_.sizes[0];
    const int64_t rows = out_.sizes[packed ? 0 : 1];
    const int64_t heads = out_.sizes[packed ? 1 : 2];
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t head = 0; head < heads; ++head) merge_row({b, row, head});
      }
    }
  }

 private:
  static constexpr int64_t kChunk = 64;  // elements of a row summed at a time, on the stack

  Lse part_lse(int64_t part, RowIndex at) const {
    const TensorView& t = parts_[part].lse;
    return static_cast<const Lse*>(t.data)[lse_offset(t, at)];
  }

  // Reads a chunk of every part before it writes that chunk, and every lse before it writes one:
  // out and lse may be a part's own.
  void merge_row(RowIndex at) const {
    const double nothing = -std::numeric_limits<double>::infinity();
    double largest = nothing;
    for (int64_t n = 0; n < count_; ++n) {
      const double lse = part_lse(n, at);
      if (lse > largest) largest = lse;
    }
    double sum = 0;  // of exp(lse - largest); NaN where any lse is
    for (int64_t n = 0; n < count_; ++n) {
      const double lse = part_lse(n, at);
      if (lse != nothing) sum += std::exp(lse - largest);
    }
    const int64_t dim = out_.sizes[static_cast<size_t>(out_.rank - 1)];
    Element* row = static_cast<Element*>(out_.data) + out_offset(out_, at);
    for (int64_t begin = 0; begin < dim; begin += kChunk) {
      const int64_t length = std::min(kChunk, dim - begin);
      std::array<double, kChunk> total{};
      for (int64_t n = 0; n < count_; ++n) {
        const double lse = part_lse(n, at);
        if (lse == nothing) continue;  // whatever its row holds
        const double weight = std::exp(lse - largest) / sum;
        const TensorView& t = parts_[n].out;
        const Element* from = static_cast<const Element*>(t.data) + out_offset(t, at) + begin;
        for (int64_t d = 0; d < length; ++d) {
          total[static_cast<size_t>(d)] += weight * load(from[d]);
        }
      }
      for (int64_t d = 0; d < length; ++d) store(total[static_cast<size_t>(d)], row[begin + d]);
    }
    // No part saw a key: largest and log(0) are both -inf, and so is their sum.
    static_cast<Lse*>(lse_.data)[lse_offset(lse_, at)] = static_cast<Lse>(largest + std::log(sum));
  }

  const PartialResult* parts_;
  int64_t count_;
  const TensorView& out_;
  const TensorView& lse_;
};

// What every out and every lse of one merge must be, taken from the out to be written.
struct MergeRules {
  TensorRule out;
  TensorRule lse;
};

MergeRules rules_from(const TensorView& out) {
  MergeRules rules;
  TensorRule& r = rules.out;
  r.call = kMerge;
  r.argument = "out";
  r.origin = "out";
  r.device = out.device;
  r.dtypes = {out.dtype, out.dtype};
  rules.lse = r;
  const DType wide = out.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  rules.lse.argument = "lse";
  rules.lse.dtypes = {wide, wide};
  rules.lse.last_stride = LastStride::kAny;
  const auto& n = out.sizes;
  if (out.rank == 3) {
    r.set_dims({{"total_q", n[0]}, {"head_q", n[1]}, {"dim_v", n[2]}});
    rules.lse.set_dims({{"head_q", n[1]}, {"total_q", n[0]}});
  } else {
    r.set_dims({{"batch", n[0]}, {"q_len", n[1]}, {"head_q", n[2]}, {"dim_v", n[3]}});
    rules.lse.set_dims({{"batch", n[0]}, {"head_q", n[2]}, {"q_len", n[1]}});
  }
  return rules;
}

// Rank, dtype, device and sizes of out, which the rules for everything else are made from.
Status check_out_itself(const TensorView& out) {
  if (!out.given()) return refuse(kMerge, "out", "not given", must_be_given());
  if (out.rank != 3 && out.rank != 4) {
    return refuse(kMerge, "out.rank", show(int64_t{out.rank}), must("be 4, or 3 when packed"));
  }
  for (size_t i = 0; i < static_cast<size_t>(out.rank); ++i) {
    if (out.sizes[i] >= 0) continue;
    return refuse(kMerge, "out.sizes[" + std::to_string(i) + "]", show(out.sizes[i]),
                  must_be_at_least(0));
  }
  if (const int64_t dim_v = out.sizes[static_cast<size_t>(out.rank - 1)]; dim_v == 0) {
    return refuse(kMerge, "out.dim_v", show(dim_v), must_be_at_least(1));
  }
  switch (out.dtype) {
    case DType::kF32:
    case DType::kF16:
    case DType::kBf16:
    case DType::kF64: break;
    default: return refuse(kMerge, "out.dtype", show(out.dtype), must("be f32, f16, bf16 or f64"));
  }
  switch (out.device.type) {
    case DeviceType::kCpu: return {};
    case DeviceType::kCuda:
      return check_cuda_device(out.device, {kMerge, "out.device", "nothing here merges on "});
  }
  return refuse(kMerge, "out.device", show(out.device), must("be cpu or cuda"));
}

// A tensor that is written may be a part's own, element for element, and overlap nothing else.
Status check_alias(const char* argument, const TensorView& written, const std::string& other,
                   const TensorView& part, bool may_be_same) {
  if (!same_start(written, part)) return {};
  bool same = may_be_same && written.dtype == part.dtype && written.rank == part.rank;
  for (size_t i = 0; same && i < static_cast<size_t>(written.rank); ++i) {
    same = written.sizes[i] == part.sizes[i] &&
           (written.sizes[i] == 1 || written.strides[i] == part.strides[i]);
  }
  if (same) return {};
  return refuse(kMerge, std::string(argument) + ".data",
                show(static_cast<const void*>(written.data)),
                must("not be that of " + other +
                     (may_be_same ? ", unless their strides are equal too" : "")));
}

Status check_part(const PartialResult& part, int64_t index, MergeRules rules, const TensorView& out,
                  const TensorView& lse) {
  const std::string name = "parts[" + std::to_string(index) + "]";
  const std::string out_name = name + ".out", lse_name = name + ".lse";
  rules.out.argument = out_name.c_str();
  rules.lse.argument = lse_name.c_str();
  if (!part.out.given()) return refuse(kMerge, out_name, "not given", must_be_given());
  if (Status s = check_tensor(part.out, rules.out); !s.ok()) return s;
  if (!part.lse.given()) return refuse(kMerge, lse_name, "not given", must_be_given());
  if (Status s = check_tensor(part.lse, rules.lse); !s.ok()) return s;
  if (Status s = check_alias("out", out, out_name, part.out, true); !s.ok()) return s;
  if (Status s = check_alias("out", out, lse_name, part.lse, false); !s.ok()) return s;
  if (Status s = check_alias("lse", lse, lse_name, part.lse, true); !s.ok()) return s;
  return check_alias("lse", lse, out_name, part.out, false);
}

Status check_merge(const PartialResult* parts, int64_t count, const TensorView& out,
                   const TensorView& lse) {
  if (count < 1) return refuse(kMerge, "count", show(count), must_be_at_least(1));
  if (parts == nullptr) {
    return refuse(kMerge, "parts", "null", must("point to count = " + show(count) + " parts"));
  }
  if (Status s = check_out_itself(out); !s.ok()) return s;
  const MergeRules rules = rules_from(out);
  TensorRule written = rules.out;
  written.access = Access::kWrite;
  if (Status s = check_tensor(out, written); !s.ok()) return s;
  if (!lse.given()) return refuse(kMerge, "lse", "not given", must_be_given());
  written = rules.lse;
  written.access = Access::kWrite;
  if (Status s = check_tensor(lse, written); !s.ok()) return s;
  if (Status s = check_alias("lse", lse, "out", out, false); !s.ok()) return s;
  for (int64_t n = 0; n < count; ++n) {
    if (Status s = check_part(parts[n], n, rules, out, lse); !s.ok()) return s;
  }
  return {};
}

template <typename Element, typename Lse>
void merge_as(const PartialResult* parts, int64_t count, const TensorView& out,
              const TensorView& lse) {
  Merger<Element, Lse>(parts, count, out, lse).run();
}

}  // namespace

Status merge(const PartialResult* parts, int64_t count, const TensorView& out,
             const TensorView& lse, Stream stream) {
  return guarded<Status>([&]() -> Status {
    if (Status s = check_merge(parts, count, out, lse); !s.ok()) return s;
    if (!has_elements(lse)) return {};  // no rows
    if (out.device.type == DeviceType::kCuda) return cuda_merge(parts, count, out, lse, stream);
    switch (out.dtype) {
      case DType::kF64: merge_as<double, double>(parts, count, out, lse); break;
      case DType::kF32: merge_as<float, float>(parts, count, out, lse); break;
      case DType::kF16: merge_as<F16, float>(parts, count, out, lse); break;
      default: merge_as<Bf16, float>(parts, count, out, lse); break;
    }
    return {};
  });
}

}  // namespace fovea
