// Launching of dense products over taps, in the types that they are made for.
#include "backend/cuda/common/device_attribute.h"
#include "backend/cuda/common/launch.cuh"
#include "backend/cuda/hopper/tensor_map.h"
#include "base/ceil_div.h"
#include "layers/cuda/dense_product.h"
#include "layers/cuda/hopper/dense_product.cuh"

namespace fovea::layers::cuda {
namespace {

constexpr int kEnoughTiles = 132;  // fewer leave much of a GPU idle: others have smaller tiles

template <typename T>
constexpr DType kTypeOf = sizeof(T) == 2 && std::is_same_v<T, __half> ? DType::kF16 : DType::kBf16;

int batch_of(const TapProduct& a) { return a.all_rows / static_cast<int>(a.span.by); }

// A tensor of four dimensions as TMA's maps take them.
template <typename T>
TensorView view_of(const void* data, std::array<int64_t, 3> sizes, std::array<int64_t, 2> strides) {
  TensorView view;
  view.data = const_cast<void*>(data);
  view.dtype = kTypeOf<T>;
  view.rank = 4;
  view.sizes = {sizes[0], sizes[1], 1, sizes[2]};
  view.strides = {strides[0], strides[1], sizes[2], 1};
  return view;
}

template <typename T>
TensorView rows_of_product(const TapProduct& a) {
  int64_t width = 0;
  for (int n = 0; n < a.blocks; ++n) {
    width = std::max<int64_t>(width, a.block[n].first + a.block[n].channels);
  }
  return view_of<T>(a.from.data, {batch_of(a), a.from_rows, width}, {a.from.batch, a.from.row});
}

template <typename T>
TensorView weights_of(const TapProduct& a, const TapBlock& block) {
  const int64_t channels = block.channels;
  return view_of<T>(block.weight, {a.taps, channels, channels}, {channels * channels, channels});
}

bool is_hopper() {
  using fovea::cuda::device_attribute;
  return device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
         device_attribute(cudaDevAttrComputeCapabilityMinor) == 0;
}

}  // namespace

template <typename T>
bool takes_dense(const TapProduct& a) {
  using Shape = DenseShape<T>;
  if (a.blocks == 0 || a.taps > Shape::kMostTaps) return false;
  for (int n = 0; n < a.blocks; ++n) {
    const TapBlock& block = a.block[n];
    // Channels of a chunk are all of the same block.
    if (block.group != block.channels || block.channels % tile::kPanelColumns != 0) return false;
    if (!fovea::cuda::hopper::takes_map(weights_of<T>(a, block))) return false;
  }
  const int64_t tiles =
      batch_of(a) * ceil_div(a.rows, Shape::kRows) * ceil_div(a.block[0].channels, a.tile_cols);
  return tiles >= kEnoughTiles && fovea::cuda::hopper::takes_map(rows_of_product<T>(a)) &&
         is_hopper();
}

template <typename T>
cudaError_t launch_dense(const TapProduct& a, cudaStream_t stream) {
  using Shape = DenseShape<T>;
  using fovea::cuda::hopper::encode_map;
  DenseProduct d;
  d.product = a;
  d.row_tiles = static_cast<int>(ceil_div(a.rows, Shape::kRows));
  d.product.row_tiles = batch_of(a) * d.row_tiles;
  bool mapped = encode_map(d.from, rows_of_product<T>(a), Shape::Left::kRows) == CUDA_SUCCESS;
  int tiles = 0;
  for (int n = 0; n < a.blocks; ++n) {
    mapped = mapped && encode_map(d.weights[n], weights_of<T>(a, a.block[n]),
                                  Shape::Right::kRows) == CUDA_SUCCESS;
    d.product.col_tiles[n] = static_cast<int>(ceil_div(a.block[n].channels, a.tile_cols));
    tiles += d.product.row_tiles * d.product.col_tiles[n];
  }
  if (!mapped) return cudaErrorInvalidValue;
  return fovea::cuda::launch<dense_product_kernel<Shape>>(
      {dim3(static_cast<unsigned>(tiles)), Shape::kThreads + 32, sizeof(typename Shape::Shared),
       stream},
      d);
}

template bool takes_dense<__nv_bfloat16>(const TapProduct&);
template bool takes_dense<__half>(const TapProduct&);
template cudaError_t launch_dense<__nv_bfloat16>(const TapProduct&, cudaStream_t);
template cudaError_t launch_dense<__half>(const TapProduct&, cudaStream_t);

}  // namespace fovea::layers::cuda
