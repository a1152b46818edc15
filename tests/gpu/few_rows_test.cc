// Products of few rows with a weight, against sums in f64.
#include "layers/cuda/few_rows.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "gpu/stream.h"
#include "harness/random.h"
#include "harness/tensors.h"
#include "support/values.h"

namespace fovea::test {
namespace {

using layers::cuda::FewRows;

// Rows of [batch, rows, width] with others before, between and after them, in memory that the host
// and the device both see.
class RowsBetweenOthers {
 public:
  RowsBetweenOthers(DType dtype, int64_t batch, int64_t rows, int64_t width, int64_t others)
      : first_(others) {
    const int64_t all = batch * (rows + others) + others;
    EXPECT_EQ(cudaMallocManaged(&data_, static_cast<size_t>(all * width * dtype_bytes(dtype))),
              cudaSuccess);
    all_ = TensorView::contiguous(data_, dtype, {all, width});
    view_ =
        TensorView::contiguous(static_cast<std::byte*>(data_) + others * width * dtype_bytes(dtype),
                               dtype, {batch, rows, width});
    view_.strides[0] = (rows + others) * width;
  }
  ~RowsBetweenOthers() { (void)cudaFree(data_); }
  RowsBetweenOthers(const RowsBetweenOthers&) = delete;
  RowsBetweenOthers& operator=(const RowsBetweenOthers&) = delete;

  void fill(uint64_t seed) const {
    for (int64_t i = 0; i < all_.sizes[0] * all_.sizes[1]; ++i) {
      const uint64_t hash = harness::hash64(seed * 1000003 + static_cast<uint64_t>(i));
      harness::write_element(all_, harness::normal(hash), i / all_.sizes[1], i % all_.sizes[1]);
    }
  }
  std::vector<double> values() const { return values_of(all_); }
  // Where the r-th row of all members of the batch begins in values().
  size_t row(int64_t r) const {
    const int64_t rows = view_.sizes[1];
    return static_cast<size_t>((r / rows * (rows + first_) + r % rows + first_) * view_.sizes[2]);
  }
  const TensorView& view() const { return view_; }
  TensorView as_weight() const {  // of one member
    return TensorView::contiguous(view_.data, view_.dtype, {view_.sizes[1], view_.sizes[2]});
  }

 private:
  int64_t first_;
  void* data_ = nullptr;
  TensorView all_, view_;
};

struct WeightedRows {
  int64_t batch, rows, in, out;
};

constexpr double kScale = 0.5;

double ulp_of_half(DType dtype) { return dtype == DType::kBf16 ? 0x1p-8 : 0x1p-11; }

// Also what lies between the rows, which is to be as it was.
void expect_values(const RowsBetweenOthers& found, const std::vector<double>& expected) {
  const std::vector<double> values = found.values();
  const double ulp = ulp_of_half(found.view().dtype);
  for (size_t n = 0; n < values.size(); ++n) {
    ASSERT_NEAR(values[n], expected[n], ulp * std::abs(expected[n]) + 1e-4) << n;
  }
}

class FewRowsOnGpu : public testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no GPU";
    cudaDeviceProp device;
    ASSERT_CUDA(cudaGetDeviceProperties(&device, 0));
    if (device.major != 9 || device.minor != 0) GTEST_SKIP() << "not compute capability 9.0";
  }

  static void expect_product(DType dtype, const WeightedRows& shape, bool gradient) {
    const int64_t depth = gradient ? shape.out : shape.in;
    const int64_t width = gradient ? shape.in : shape.out;
    RowsBetweenOthers from(dtype, shape.batch, shape.rows, depth, 1);
    RowsBetweenOthers weight(dtype, 1, shape.out, shape.in, 0);
    RowsBetweenOthers to(dtype, shape.batch, shape.rows, width, 4);
    from.fill(1);
    weight.fill(2);
    to.fill(3);
    const std::vector<double> x = from.values(), w = weight.values();
    std::vector<double> expected = to.values();
    for (int64_t r = 0; r < shape.batch * shape.rows; ++r) {
      for (int64_t c = 0; c < width; ++c) {
        double sum = 0;
        const double* const row = x.data() + from.row(r);
        const double* const column = w.data() + (gradient ? c : c * depth);
        for (int64_t k = 0; k < depth; ++k) sum += row[k] * column[gradient ? k * width : k];
        expected[to.row(r) + static_cast<size_t>(c)] = kScale * sum;
      }
    }
    FewRows product{from.view(), weight.as_weight(), to.view(), gradient, kScale};
    ASSERT_TRUE(takes_few_rows(product));
    for (const bool early : {false, true}) {
      product.settled = product.leaves_early = early;
      to.fill(3);
      ASSERT_CUDA(launch_few_rows(product, nullptr));
      ASSERT_CUDA(cudaDeviceSynchronize());
      expect_values(to, expected);
    }
  }
};

TEST_F(FewRowsOnGpu, AreTheProduct) {
  for (const DType dtype : {DType::kBf16, DType::kF16}) {
    for (const WeightedRows& shape : {WeightedRows{1, 1, 64, 64},
                                      {2, 65, 128, 192},
                                      {1, 64, 512, 64},
                                      {3, 20, 192, 128},
                                      {1, 10, 64, 512}}) {
      for (const bool gradient : {false, true}) {
        SCOPED_TRACE(std::to_string(shape.in) + " to " + std::to_string(shape.out) +
                     (gradient ? ", gradient" : ""));
        expect_product(dtype, shape, gradient);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(FewRowsOnGpu, OthersAreLeftToALibrary) {
  const auto product = [](DType dtype, const WeightedRows& shape) {
    return FewRows{TensorView::contiguous(nullptr, dtype, {shape.batch, shape.rows, shape.in}),
                   TensorView::contiguous(nullptr, dtype, {shape.out, shape.in}),
                   TensorView::contiguous(nullptr, dtype, {shape.batch, shape.rows, shape.out})};
  };
  EXPECT_TRUE(takes_few_rows(product(DType::kBf16, {1, 64, 64, 64})));
  EXPECT_FALSE(takes_few_rows(product(DType::kF32, {1, 64, 64, 64})));
  EXPECT_FALSE(takes_few_rows(product(DType::kBf16, {1, 64, 96, 64})));
  EXPECT_FALSE(takes_few_rows(product(DType::kBf16, {1, 64, 64, 96})));
  EXPECT_FALSE(takes_few_rows(product(DType::kBf16, {0, 64, 64, 64})));
  EXPECT_FALSE(takes_few_rows(product(DType::kBf16, {4, 20000, 64, 64})));
  EXPECT_FALSE(takes_few_rows(product(DType::kBf16, {1, 64, 1024, 64})));
  FewRows beside = product(DType::kBf16, {1, 1024, 64, 128});
  EXPECT_TRUE(takes_few_rows(beside));
  beside.share = 0.1;  // fewer multiprocessors than tiles
  EXPECT_FALSE(takes_few_rows(beside));
  FewRows odd = product(DType::kBf16, {1, 64, 64, 64});
  odd.weight.data = reinterpret_cast<void*>(uintptr_t{2});
  EXPECT_FALSE(takes_few_rows(odd));
}

}  // namespace
}  // namespace fovea::test
