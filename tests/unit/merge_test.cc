// Merge of partial results: identities that hold for any data, and what it refuses.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "backend/cuda/device.h"
#include "base/half.h"
#include "fovea/attention.h"

namespace fovea {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr int64_t kBatch = 2, kRows = 3, kHeads = 2, kDim = 70;  // more than one chunk of a row
constexpr int64_t kLses = kBatch * kHeads * kRows, kElements = kLses * kDim;

// One dense f32 result that owns its memory.
struct Part {
  std::vector<float> out = std::vector<float>(kElements);
  std::vector<float> lse = std::vector<float>(kLses);

  TensorView out_view() {
    return TensorView::contiguous(out.data(), DType::kF32, {kBatch, kRows, kHeads, kDim});
  }
  TensorView lse_view() {
    return TensorView::contiguous(lse.data(), DType::kF32, {kBatch, kHeads, kRows});
  }
  PartialResult view() { return {out_view(), lse_view()}; }
};

int64_t out_at(int64_t b, int64_t i, int64_t h) { return ((b * kRows + i) * kHeads + h) * kDim; }
int64_t lse_at(int64_t b, int64_t i, int64_t h) { return (b * kHeads + h) * kRows + i; }

Part random_part(uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Part part;
  for (float& x : part.out) x = normal(random);
  for (float& x : part.lse) x = 3 * normal(random);
  return part;
}

Part merged(std::vector<Part*> parts) {
  std::vector<PartialResult> views;
  for (Part* part : parts) views.push_back(part->view());
  Part result;
  std::fill(result.out.begin(), result.out.end(), std::nanf(""));
  std::fill(result.lse.begin(), result.lse.end(), std::nanf(""));
  const Status s =
      merge(views.data(), static_cast<int64_t>(views.size()), result.out_view(), result.lse_view());
  EXPECT_TRUE(s.ok()) << s.message();
  return result;
}

void expect_near(const Part& a, const Part& b, float bound) {
  for (size_t n = 0; n < a.out.size(); ++n) ASSERT_NEAR(a.out[n], b.out[n], bound) << n;
  for (size_t n = 0; n < a.lse.size(); ++n) ASSERT_NEAR(a.lse[n], b.lse[n], bound) << n;
}

TEST(MergeTest, OnePartIsItself) {
  Part a = random_part(1);
  const Part result = merged({&a});
  EXPECT_EQ(result.out, a.out);
  EXPECT_EQ(result.lse, a.lse);
}

TEST(MergeTest, WeighsByTheShareOfTheDenominator) {
  Part a = random_part(1), b = random_part(2);
  const Part result = merged({&a, &b});
  for (int64_t n = 0; n < kBatch; ++n) {
    for (int64_t i = 0; i < kRows; ++i) {
      for (int64_t h = 0; h < kHeads; ++h) {
        const auto l = static_cast<size_t>(lse_at(n, i, h));
        const double wa = std::exp(double{a.lse[l]}), wb = std::exp(double{b.lse[l]});
        EXPECT_NEAR(result.lse[l], std::log(wa + wb), 1e-5);
        for (int64_t d = 0; d < kDim; ++d) {
          const auto o = static_cast<size_t>(out_at(n, i, h) + d);
          EXPECT_NEAR(result.out[o], (wa * a.out[o] + wb * b.out[o]) / (wa + wb), 1e-6);
        }
      }
    }
  }
}

TEST(MergeTest, AnyOrderAndAnyGrouping) {
  Part a = random_part(1), b = random_part(2), c = random_part(3);
  const Part whole = merged({&a, &b, &c});
  expect_near(whole, merged({&c, &a, &b}), 1e-6f);
  Part ab = merged({&a, &b});
  expect_near(whole, merged({&ab, &c}), 1e-5f);
}

// (anything, -inf) is the identity: what its rows hold never matters.
TEST(MergeTest, PartThatSawNothingAddsNothing) {
  Part a = random_part(1), nothing;
  std::fill(nothing.out.begin(), nothing.out.end(), std::nanf(""));
  std::fill(nothing.lse.begin(), nothing.lse.end(), kNothing);
  for (const Part& result : {merged({&a, &nothing}), merged({&nothing, &a})}) {
    EXPECT_EQ(result.out, a.out);
    EXPECT_EQ(result.lse, a.lse);
  }
  const Part empty = merged({&nothing, &nothing});
  for (const float x : empty.out) EXPECT_EQ(x, 0.0f);
  for (const float x : empty.lse) EXPECT_EQ(x, kNothing);
}

TEST(MergeTest, HugeLseDoesNotOverflow) {
  Part a = random_part(1), b = random_part(2);
  std::fill(a.lse.begin(), a.lse.end(), 30000.0f);
  std::fill(b.lse.begin(), b.lse.end(), 30000.0f);
  const Part result = merged({&a, &b});
  EXPECT_FLOAT_EQ(result.lse[0], 30000.0f + std::log(2.0f));
  EXPECT_NEAR(result.out[5], (a.out[5] + b.out[5]) / 2, 1e-6);
}

TEST(MergeTest, NanStaysInItsRow) {
  Part a = random_part(1), b = random_part(2);
  const Part clean = merged({&a, &b});
  a.lse[static_cast<size_t>(lse_at(1, 2, 0))] = std::nanf("");
  const Part result = merged({&a, &b});
  for (size_t o = 0; o < result.out.size(); ++o) {
    const auto at = static_cast<int64_t>(o);
    if (at >= out_at(1, 2, 0) && at < out_at(1, 2, 0) + kDim) {
      EXPECT_TRUE(std::isnan(result.out[o]));
    } else {
      EXPECT_EQ(result.out[o], clean.out[o]);
    }
  }
}

TEST(MergeTest, OutMayBeAPartsOwn) {
  for (const int into : {0, 1}) {
    Part a = random_part(1), b = random_part(2);
    const Part expected = merged({&a, &b});
    Part& target = into == 0 ? a : b;
    const PartialResult parts[] = {a.view(), b.view()};
    ASSERT_TRUE(merge(parts, 2, target.out_view(), target.lse_view()).ok());
    EXPECT_EQ(target.out, expected.out);
    EXPECT_EQ(target.lse, expected.lse);
  }
}

// The packed layout is one long sequence: the same numbers under other names.
TEST(MergeTest, PackedIsDenseOfOneSequence) {
  Part a = random_part(1), b = random_part(2);
  const auto out_view = [](Part& p) {
    return TensorView::contiguous(p.out.data(), DType::kF32, {kBatch * kRows, kHeads, kDim});
  };
  const auto lse_view = [](Part& p) {
    return TensorView::contiguous(p.lse.data(), DType::kF32, {kHeads, kBatch * kRows});
  };
  Part packed, dense;
  const PartialResult parts[] = {{out_view(a), lse_view(a)}, {out_view(b), lse_view(b)}};
  ASSERT_TRUE(merge(parts, 2, out_view(packed), lse_view(packed)).ok());
  const auto as_dense = [](TensorView out, TensorView lse) {
    return PartialResult{
        TensorView::contiguous(out.data, DType::kF32, {1, kBatch * kRows, kHeads, kDim}),
        TensorView::contiguous(lse.data, DType::kF32, {1, kHeads, kBatch * kRows})};
  };
  const PartialResult same[] = {as_dense(parts[0].out, parts[0].lse),
                                as_dense(parts[1].out, parts[1].lse)};
  const PartialResult target = as_dense(dense.out_view(), dense.lse_view());
  ASSERT_TRUE(merge(same, 2, target.out, target.lse).ok());
  EXPECT_EQ(packed.out, dense.out);
  EXPECT_EQ(packed.lse, dense.lse);
}

TEST(MergeTest, StridesChangeNothing) {
  Part a = random_part(1), b = random_part(2);
  const Part expected = merged({&a, &b});
  // out in [head, batch, row] order with padded rows, lse transposed.
  constexpr int64_t kPadded = kDim + 3;
  std::vector<float> out(static_cast<size_t>(kLses * kPadded), -7.0f), lse(kLses);
  const auto out_view =
      TensorView::strided(out.data(), DType::kF32, {kBatch, kRows, kHeads, kDim},
                          {kRows * kPadded, kPadded, kBatch * kRows * kPadded, 1});
  const auto lse_view = TensorView::strided(lse.data(), DType::kF32, {kBatch, kHeads, kRows},
                                            {1, kBatch * kRows, kBatch});
  const PartialResult parts[] = {a.view(), b.view()};
  ASSERT_TRUE(merge(parts, 2, out_view, lse_view).ok());
  for (int64_t n = 0; n < kBatch; ++n) {
    for (int64_t i = 0; i < kRows; ++i) {
      for (int64_t h = 0; h < kHeads; ++h) {
        const int64_t row = ((h * kBatch + n) * kRows + i) * kPadded;
        EXPECT_EQ(
            std::memcmp(&out[static_cast<size_t>(row)],
                        &expected.out[static_cast<size_t>(out_at(n, i, h))], kDim * sizeof(float)),
            0);
        EXPECT_EQ(out[static_cast<size_t>(row + kDim)], -7.0f) << "padding was written";
        EXPECT_EQ(lse[static_cast<size_t>((h * kRows + i) * kBatch + n)],
                  expected.lse[static_cast<size_t>(lse_at(n, i, h))]);
      }
    }
  }
}

template <typename Half>
void expect_half_merge(DType dtype, Half (*narrow)(float)) {
  std::vector<Half> a = {narrow(1.0f), narrow(-3.0f)}, b = {narrow(2.0f), narrow(5.0f)}, out(2);
  float lse_a = 0.0f, lse_b = std::log(3.0f), lse = 0;
  const auto view = [&](std::vector<Half>& x) {
    return TensorView::contiguous(x.data(), dtype, {1, 1, 1, 2});
  };
  const auto lse_view = [&](float& x) {
    return TensorView::contiguous(&x, DType::kF32, {1, 1, 1});
  };
  const PartialResult parts[] = {{view(a), lse_view(lse_a)}, {view(b), lse_view(lse_b)}};
  ASSERT_TRUE(merge(parts, 2, view(out), lse_view(lse)).ok());
  EXPECT_EQ(out[0].bits, narrow(1.75f).bits);
  EXPECT_EQ(out[1].bits, narrow(3.0f).bits);
  EXPECT_FLOAT_EQ(lse, std::log(4.0f));
}

TEST(MergeTest, HalfTypes) {
  expect_half_merge<F16>(DType::kF16, to_f16);
  expect_half_merge<Bf16>(DType::kBf16, to_bf16);
}

TEST(MergeTest, DoubleKeepsDoublePrecision) {
  double a = 1.0, b = 2.0, out = 0, lse_a = 0.0, lse_b = std::log(2.0), lse = 0;
  const auto view = [](double& x) { return TensorView::contiguous(&x, DType::kF64, {1, 1, 1, 1}); };
  const auto lse_view = [](double& x) {
    return TensorView::contiguous(&x, DType::kF64, {1, 1, 1});
  };
  const PartialResult parts[] = {{view(a), lse_view(lse_a)}, {view(b), lse_view(lse_b)}};
  ASSERT_TRUE(merge(parts, 2, view(out), lse_view(lse)).ok());
  EXPECT_NEAR(out, 5.0 / 3.0, 1e-15);
  EXPECT_NEAR(lse, std::log(3.0), 1e-15);
}

TEST(MergeTest, NoRowsIsLegal) {
  const auto out = TensorView::contiguous(nullptr, DType::kF32, {2, 0, 4, 8});
  const auto lse = TensorView::contiguous(nullptr, DType::kF32, {2, 4, 0});
  const PartialResult part{out, lse};
  EXPECT_TRUE(merge(&part, 1, out, lse).ok());
}

class MergeRefusal : public testing::Test {
 protected:
  std::string message(const TensorView& out, const TensorView& lse) {
    const PartialResult parts[] = {a_.view(), b_};
    const Status s = merge(parts, count_, out, lse);
    EXPECT_EQ(s.code(), StatusCode::kInvalidArgument);
    return s.message();
  }
  std::string message() { return message(out_, lse_); }

  Part a_ = random_part(1), other_ = random_part(2), result_;
  PartialResult b_ = other_.view();
  TensorView out_ = result_.out_view(), lse_ = result_.lse_view();
  int64_t count_ = 2;
};

TEST_F(MergeRefusal, Parts) {
  count_ = 0;
  EXPECT_EQ(message(), "merge: count is 0, must be at least 1");
  EXPECT_EQ(merge(nullptr, 2, out_, lse_).message(),
            "merge: parts is null, must point to count = 2 parts");
}

TEST_F(MergeRefusal, PartsThatDoNotMatchOut) {
  b_.out.sizes[3] = 64;
  EXPECT_EQ(message(), "merge: parts[1].out.dim_v is 64, must equal out.dim_v = 70");
  b_ = other_.view();
  b_.lse.dtype = DType::kF64;
  EXPECT_EQ(message(), "merge: parts[1].lse.dtype is f64, must be f32");
  b_ = other_.view();
  b_.lse = {};
  EXPECT_EQ(message(), "merge: parts[1].lse is not given, must be given");
  b_ = other_.view();
  b_.out.strides[3] = 2;
  EXPECT_EQ(message(), "merge: parts[1].out.strides[3] is 2, must be 1 in the last dimension");
}

TEST_F(MergeRefusal, OutItself) {
  TensorView bad = out_;
  bad.rank = 2;
  EXPECT_EQ(message(bad, lse_), "merge: out.rank is 2, must be 4, or 3 when packed");
  bad = out_;
  bad.dtype = DType::kI32;
  EXPECT_EQ(message(bad, lse_), "merge: out.dtype is i32, must be f32, f16, bf16 or f64");
  bad = out_;
  bad.sizes[1] = -3;
  EXPECT_EQ(message(bad, lse_), "merge: out.sizes[1] is -3, must be at least 0");
  bad = out_;
  bad.strides[0] = 0;
  EXPECT_NE(message(bad, lse_).find("out.strides[0] is 0, must be above"), std::string::npos);
  EXPECT_EQ(message({}, lse_), "merge: out is not given, must be given");
  EXPECT_EQ(message(out_, {}), "merge: lse is not given, must be given");
}

TEST_F(MergeRefusal, Devices) {
  b_.lse.device = Device::cuda(0);
  EXPECT_EQ(message(), "merge: parts[1].lse.device is cuda:0, must be cpu");
  TensorView bad = out_;
  bad.device = {static_cast<DeviceType>(7), 0};
  EXPECT_EQ(message(bad, lse_), "merge: out.device is device type 7, must be cpu or cuda");
  if (cuda_device_count() > 0) return;
  bad.device = Device::cuda(0);
  const PartialResult parts[] = {a_.view()};
  const Status s = merge(parts, 1, bad, lse_);
  EXPECT_EQ(s.code(), StatusCode::kUnsupported);
  EXPECT_EQ(s.message().rfind("merge: nothing here merges on cuda:0\n  cuda  ", 0), 0u)
      << s.message();
}

TEST_F(MergeRefusal, AliasesThatAreNotElementForElement) {
  TensorView shifted = a_.out_view();
  std::swap(shifted.strides[0], shifted.strides[2]);
  shifted.sizes = out_.sizes;
  shifted.strides = {kDim, kBatch * kHeads * kDim, kBatch * kDim, 1};  // same memory, other order
  EXPECT_NE(message(shifted, lse_).find("must not be that of parts[0].out"), std::string::npos);
}

}  // namespace
}  // namespace fovea
