// Copies of a layer's tensors to a GPU and back.
#include "layer_on_device.h"

namespace fovea::test {
namespace {

// From the first element to the last, whatever lies between them.
size_t extent_bytes(const TensorView& t) {
  int64_t last = 0;
  for (size_t d = 0; d < static_cast<size_t>(t.rank); ++d) {
    if (t.sizes[d] == 0) return 0;
    last += (t.sizes[d] - 1) * t.strides[d];
  }
  return static_cast<size_t>((last + 1) * dtype_bytes(t.dtype));
}

void expect_success(cudaError_t error) {
  EXPECT_EQ(error, cudaSuccess) << cudaGetErrorString(error);
}

}  // namespace

TensorView DeviceCopies::there(const TensorView& host) {
  if (!host.given()) return {};
  Copy& copy = copies_.emplace_back();
  copy.host = host;
  copy.bytes = extent_bytes(host);
  copy.offset = reinterpret_cast<uintptr_t>(host.data) % kWidestRead;
  const Status reserved = copy.block.reserve(copy.offset + copy.bytes + 1, 0);
  EXPECT_TRUE(reserved.ok()) << reserved.message();
  TensorView view = host;
  view.data = copy.data();
  view.device = Device::cuda(0);
  return view;
}

LayerInputs DeviceCopies::there(const LayerInputs& in) {
  LayerInputs copy = in;
  for (TensorView* t : {&copy.query, &copy.key, &copy.value, &copy.mask, &copy.position_ids,
                        &copy.key_position_ids}) {
    *t = there(*t);
  }
  return copy;
}

void DeviceCopies::upload() const {
  for (const Copy& copy : copies_) {
    expect_success(cudaMemcpy(copy.data(), copy.host.data, copy.bytes, cudaMemcpyHostToDevice));
  }
  expect_success(cudaDeviceSynchronize());
}

void DeviceCopies::download() const {
  expect_success(cudaDeviceSynchronize());
  for (const Copy& copy : copies_) {
    expect_success(cudaMemcpy(copy.host.data, copy.data(), copy.bytes, cudaMemcpyDeviceToHost));
  }
}

}  // namespace fovea::test
