// Tensor views: dense, strided, and from DLPack's struct.
#include "fovea/tensor.h"

#include <gtest/gtest.h>

namespace fovea {
namespace {

using Four = std::array<int64_t, 4>;

TEST(TensorViewTest, ContiguousStridesAreRowMajor) {
  float data[1];
  const auto t = TensorView::contiguous(data, DType::kF32, {2, 3, 5, 7});
  EXPECT_EQ(t.rank, 4);
  EXPECT_EQ(t.sizes, (Four{2, 3, 5, 7}));
  EXPECT_EQ(t.strides, (Four{105, 35, 7, 1}));
  EXPECT_EQ(t.elements(), 210);
  EXPECT_EQ(t.data, data);
  EXPECT_EQ(t.device, Device::cpu());
}

TEST(TensorViewTest, StridedKeepsWhatItIsGiven) {
  const auto t = TensorView::strided(nullptr, DType::kBf16, {2, 3}, {1, 2}, Device::cuda(1));
  EXPECT_EQ(t.rank, 2);
  EXPECT_EQ(t.strides, (Four{1, 2, 0, 0}));
  EXPECT_EQ(t.device, Device::cuda(1));
}

TEST(TensorViewTest, ImpossibleRanksGiveARefusedView) {
  EXPECT_EQ(TensorView::contiguous(nullptr, DType::kF32, {1, 1, 1, 1, 1}).rank, -1);
  EXPECT_EQ(TensorView::strided(nullptr, DType::kF32, {1, 2}, {1}).rank, -1);
  EXPECT_TRUE(TensorView::strided(nullptr, DType::kF32, {1, 2}, {1}).given());
}

TEST(TensorViewTest, OverflowingSizesDoNotWrap) {
  const int64_t big = int64_t{1} << 40;
  const auto t = TensorView::contiguous(nullptr, DType::kF32, {2, big, big, 1});
  EXPECT_GT(t.strides[0], 0);
}

TEST(TensorViewTest, GivenMeansRankOrData) {
  float x = 0;
  TensorView t;
  EXPECT_FALSE(t.given());
  t.data = &x;
  EXPECT_TRUE(t.given());
  EXPECT_TRUE(TensorView::contiguous(nullptr, DType::kF32, {0}).given());
}

TEST(DTypeTest, NamesAndSizes) {
  EXPECT_STREQ(dtype_name(DType::kF32), "f32");
  EXPECT_STREQ(dtype_name(DType::kF16), "f16");
  EXPECT_STREQ(dtype_name(DType::kBf16), "bf16");
  EXPECT_STREQ(dtype_name(DType::kF64), "f64");
  EXPECT_STREQ(dtype_name(DType::kBool), "bool");
  EXPECT_STREQ(dtype_name(DType::kI32), "i32");
  EXPECT_STREQ(dtype_name(static_cast<DType>(99)), "unknown");
  EXPECT_EQ(dtype_bytes(DType::kF64), 8);
  EXPECT_EQ(dtype_bytes(DType::kBool), 1);
}

// The layout of DLPack's dlpack.h, written out so that the test needs no other library.
struct DLDevice {
  int device_type;
  int32_t device_id;
};
struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

class DlpackTest : public testing::Test {
 protected:
  int64_t shape_[5] = {2, 3, 4, 5, 6};
  int64_t strides_[5] = {100, 20, 5, 1, 1};
  char memory_[64] = {};
  DLTensor tensor_{memory_, {1, 0}, 4, {2, 32, 1}, shape_, nullptr, 0};
};

TEST_F(DlpackTest, NullStridesAreDense) {
  const auto t = TensorView::from_dlpack(tensor_);
  EXPECT_EQ(t.rank, 4);
  EXPECT_EQ(t.sizes, (Four{2, 3, 4, 5}));
  EXPECT_EQ(t.strides, (Four{60, 20, 5, 1}));
}

TEST_F(DlpackTest, StridesAndOffsetAreKept) {
  tensor_.strides = strides_;
  tensor_.byte_offset = 8;
  const auto t = TensorView::from_dlpack(tensor_);
  EXPECT_EQ(t.strides, (Four{100, 20, 5, 1}));
  EXPECT_EQ(t.data, memory_ + 8);
}

TEST_F(DlpackTest, EveryTypeHasItsName) {
  const std::pair<DLDataType, DType> types[] = {
      {{2, 64, 1}, DType::kF64},  {{2, 32, 1}, DType::kF32}, {{2, 16, 1}, DType::kF16},
      {{4, 16, 1}, DType::kBf16}, {{6, 8, 1}, DType::kBool}, {{0, 32, 1}, DType::kI32}};
  for (const auto& [dlpack, dtype] : types) {
    tensor_.dtype = dlpack;
    EXPECT_EQ(TensorView::from_dlpack(tensor_).dtype, dtype);
    EXPECT_EQ(TensorView::from_dlpack(tensor_).rank, 4);
  }
}

TEST_F(DlpackTest, WhatHasNoNameIsRefused) {
  DLTensor bad = tensor_;
  bad.dtype = {0, 64, 1};
  EXPECT_EQ(TensorView::from_dlpack(bad).rank, -1);
  bad = tensor_;
  bad.dtype.lanes = 4;
  EXPECT_EQ(TensorView::from_dlpack(bad).rank, -1);
  bad = tensor_;
  bad.ndim = 5;
  EXPECT_EQ(TensorView::from_dlpack(bad).rank, -1);
  bad = tensor_;
  bad.device.device_type = 8;
  EXPECT_EQ(TensorView::from_dlpack(bad).rank, -1);
}

TEST_F(DlpackTest, CudaKeepsItsIndex) {
  tensor_.device = {2, 3};
  EXPECT_EQ(TensorView::from_dlpack(tensor_).device, Device::cuda(3));
}

}  // namespace
}  // namespace fovea
