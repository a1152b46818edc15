// Wrong merges are refused, with the argument's name, and nothing is written.
#include <gtest/gtest.h>

#include <limits>

#include "fuzz/invalid_subject.h"

namespace fovea::invalid {
namespace {

constexpr std::byte kFill{0x3c};

// A valid merge of a few small parts, dense or packed.
struct MergeSubject {
  explicit MergeSubject(uint64_t seed) : random(seed * 0x9E3779B97F4A7C15u) {
    dtype = random.pick<DType>({DType::kF32, DType::kF16, DType::kBf16, DType::kF64});
    packed = random.chance(40);
    for (int64_t& size : sizes) size = random.range(1, 4);
    parts.resize(static_cast<size_t>(random.range(1, 3)));
    for (PartialResult& part : parts) part = {place_out(), place_lse()};
    out = place_out();
    lse = place_lse();
  }

  TensorView place(DType type, std::initializer_list<int64_t> shape) {
    TensorView t = TensorView::contiguous(nullptr, type, shape);
    t.data = arena.take(t.elements() * dtype_bytes(type), kFill);
    return t;
  }
  TensorView place_out() {
    const auto [batch, rows, heads, dim] = sizes;
    return packed ? place(dtype, {rows, heads, dim}) : place(dtype, {batch, rows, heads, dim});
  }
  TensorView place_lse() {
    const auto [batch, rows, heads, dim] = sizes;
    const DType wide = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
    return packed ? place(wide, {heads, rows}) : place(wide, {batch, heads, rows});
  }

  Status run() const { return merge(parts.data(), count(), out, lse); }
  int64_t count() const { return static_cast<int64_t>(parts.size()); }

  // Any of the tensors, with the name that messages give it.
  std::pair<std::string, TensorView*> any_tensor() {
    const int64_t n = random.range(-1, count() - 1);
    const bool is_out = random.chance(50);
    if (n < 0) return is_out ? std::pair("out", &out) : std::pair("lse", &lse);
    PartialResult& part = parts[static_cast<size_t>(n)];
    const std::string name = "parts[" + std::to_string(n) + "].";
    return is_out ? std::pair(name + "out", &part.out) : std::pair(name + "lse", &part.lse);
  }

  Random random;
  Arena arena;
  DType dtype;
  bool packed;
  std::array<int64_t, 4> sizes{};
  std::vector<PartialResult> parts;
  TensorView out, lse;
};

// Spoils one thing and gives a name the message must hold. Sizes, rank and dtype of out are what
// the others are measured by, so those are spoilt in the other tensors only.
std::string spoil(MergeSubject& s) {
  auto [name, t] = s.any_tensor();
  const bool measure = name == "out";
  switch (s.random.range(0, 7)) {
    case 0: *t = {}; return name + " is not given";
    case 1: t->rank = s.random.pick<int>({-1, 1, 5, 100}); return name + ".rank is ";
    case 2:
      if (measure) {
        t->dtype = DType::kBool;
      } else {
        t->dtype = t->dtype == DType::kF32 ? DType::kF64 : DType::kF32;
      }
      return name + ".dtype is ";
    case 3: {
      const auto dim = static_cast<size_t>(s.random.range(0, t->rank - 1));
      t->sizes[dim] = measure ? -1 : t->sizes[dim] + s.random.pick<int64_t>({-9, 1, 77});
      return name + ".";
    }
    case 4: t->data = nullptr; return name + ".data is null";
    case 5: t->data = static_cast<char*>(t->data) + 1; return name + ".data is ";
    case 6:
      t->device = measure ? Device{static_cast<DeviceType>(7), 0} : Device::cuda(0);
      return name + ".device is ";
    default: {
      const auto dim = static_cast<size_t>(s.random.range(0, t->rank - 1));
      if (t->sizes[dim] == 1) return {};
      t->strides[dim] = s.random.pick<int64_t>({-1, std::numeric_limits<int64_t>::max()});
      return name + ".strides[";
    }
  }
}

TEST(FuzzInvalid, EveryWrongMergeIsRefusedByName) {
  const uint64_t count = case_count(), first = first_seed();
  for (uint64_t seed = first; seed < first + count; ++seed) {
    MergeSubject subject(seed);
    const Status before = subject.run();
    ASSERT_TRUE(before.ok()) << before.message() << reproduce(seed, "none");
    std::string expected;
    while (expected.empty()) expected = spoil(subject);
    subject.arena.remember();
    const Status after = subject.run();
    ASSERT_EQ(after.code(), StatusCode::kInvalidArgument)
        << after.message() << reproduce(seed, expected.c_str());
    ASSERT_EQ(after.message().rfind("merge: " + expected, 0), 0u)
        << after.message() << reproduce(seed, expected.c_str());
    ASSERT_TRUE(subject.arena.unchanged()) << reproduce(seed, expected.c_str());
  }
}

}  // namespace
}  // namespace fovea::invalid
