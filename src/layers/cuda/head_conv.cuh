// The kernel of a convolution of each head's channels among themselves, for heads that are small: a
// block makes a tile of rows and heads from rows and weights that all come at once, weights as they
// lie in memory.
#pragma once

#include "layers/cuda/tap_product.cuh"
#include "layers/cuda/whole_conv.cuh"

namespace fovea::layers::cuda {

struct HeadConv {
  TapProduct product;  // its weights are [channels, group, taps]
  Divider pieces;      // of 16 bytes in a row of weights
};

template <typename T_>
struct HeadConvShape {
  using T = T_;
  static constexpr int kRows = 64, kCols = 128, kThreads = 256, kM = kRows / 16;
  static constexpr int kMostTaps = 16, kMostDepth = 96;  // channels of a group and taps
  static constexpr int kPitch = kCols + kRowPadding;     // of rows and of sums
  static constexpr int kRowBytes = (kRows + kMostTaps) * kPitch * 2;
  static constexpr int kWeightBytes = kCols * (kMostDepth + kRowPadding) * 2;
  static constexpr int kSharedBytes = kRowBytes + kWeightBytes + kRows * kPitch * 4;

  static bool takes(int group, int taps) {
    return group <= kCols && taps <= kMostTaps && group * taps <= kMostDepth;
  }
};

template <typename Shape, bool kBackward>
__global__ void __launch_bounds__(Shape::kThreads, 2)
    head_conv_kernel(const __grid_constant__ HeadConv conv) {
  using T = typename Shape::T;
  extern __shared__ __align__(128) std::byte shared[];
  std::byte* const s_weights = shared + Shape::kRowBytes;
  T* const s_x = reinterpret_cast<T*>(shared);
  float* const s_sums = reinterpret_cast<float*>(s_weights + Shape::kWeightBytes);
  const TapProduct& a = conv.product;
  const TileAt tile(a, Shape::kRows);
  const TapBlock& block = a.block[tile.block];
  const WholeBlock weights{
      .first = 0,
      .channels = tile.cols,
      .group = block.group,
      .weight = static_cast<const T*>(block.weight) + int64_t{tile.col} * block.group * a.taps,
      .offset = 0,
      .pieces = conv.pieces};
  ptx::wait_for_earlier_kernels();

  load_weights<T>(weights, a.taps, s_weights);
  constexpr int kPieces = Shape::kCols / 8, kRowStep = Shape::kThreads / kPieces;
  const int col = threadIdx.x % kPieces * 8;
  for (int r = threadIdx.x / kPieces; r < Shape::kRows + a.taps - 1; r += kRowStep) {
    const RowAt at(tile.row + r, a.span);
    const int row = at.r + a.first_row;
    const bool in = tile.row + r < a.all_rows && row >= 0 && row < a.from_rows && col < tile.cols;
    const T* const from = a.from.template at<T>(in ? at.b : 0, in ? row : 0) + block.first +
                          (in ? tile.col + col : 0);
    ptx::cp_async_16(ptx::shared_address(s_x + r * Shape::kPitch + col), from, in ? 16 : 0);
  }
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();

  for (int n = threadIdx.x / 32; n < pieces_of(weights); n += Shape::kThreads / 32) {
    convolve_piece<T, kBackward, Shape::kM>(weights, a.taps, s_weights, s_x, Shape::kPitch, n,
                                            [&](int c, int m, const ptx::Fragment& sum) {
                                              store_fragment(s_sums, Shape::kPitch, c, m, sum);
                                            });
  }
  __syncthreads();
  end_rows<Shape>(a, tile, s_sums, [&](int r) {
    const int number = tile.row + r;
    const RowAt at(number, a.span);
    return TokenAt{at.b * a.rows + at.r, at, number < a.all_rows && at.r < a.rows};
  });
}

}  // namespace fovea::layers::cuda
