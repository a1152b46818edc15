// Launching of products of few rows.
#include "backend/cuda/common/device_attribute.h"
#include "backend/cuda/common/launch.cuh"
#include "backend/cuda/hopper/tensor_map.h"
#include "base/ceil_div.h"
#include "layers/cuda/few_rows.h"
#include "layers/cuda/hopper/few_rows.cuh"

namespace fovea::layers::cuda {
namespace {

using fovea::cuda::device_attribute;

constexpr int64_t kMostDepth = 512;  // longer ones take their time anyway

// [batch, rows, width] or [rows, width] as TMA's maps take them.
TensorView with_heads(const TensorView& t) {
  TensorView view = t;
  const bool batched = t.rank == 3;
  const size_t row = batched ? 1 : 0;
  const int64_t width = t.sizes[row + 1];
  view.rank = 4;
  view.sizes = {batched ? t.sizes[0] : 1, t.sizes[row], 1, width};
  view.strides = {batched ? t.strides[0] : 0, t.strides[row], width, 1};
  return view;
}

int row_tiles(const FewRows& p) {
  return static_cast<int>(ceil_div(p.from.sizes[1], kFewRowsTile));
}

// Whether its tiles all run at once. Beside another product each has a multiprocessor, or the other
// would have to wait for some.
bool is_small(const FewRows& p) {
  constexpr int kTilesOfSm = 3;  // by their shared memory
  const int64_t tiles = p.from.sizes[0] * row_tiles(p) * (p.to.sizes[2] / kFewRowsTile);
  const double sms = p.share * device_attribute(cudaDevAttrMultiProcessorCount);
  return static_cast<double>(tiles) <= (p.share < 1 ? 1 : kTilesOfSm) * sms;
}

template <typename Shape>
cudaError_t launch_shape(const FewRows& p, cudaStream_t stream) {
  const auto encode = [](CUtensorMap& map, const TensorView& t, int rows) {
    return fovea::cuda::hopper::encode_map(map, with_heads(t), rows) == CUDA_SUCCESS;
  };
  FewRowsProduct a;
  if (!encode(a.from, p.from, Shape::kRows) || !encode(a.weight, p.weight, Shape::Right::kRows)) {
    return cudaErrorInvalidValue;
  }
  a.to = p.to.data;
  a.to_batch = p.to.strides[0];
  a.to_row = p.to.strides[1];
  a.rows = static_cast<int>(p.from.sizes[1]);
  a.row_tiles = row_tiles(p);
  a.chunks = static_cast<int>(p.from.sizes[2] / Shape::kDepth);
  a.scale = p.scale;
  a.settled = p.settled;
  a.leaves_early = p.leaves_early;
  const dim3 blocks(static_cast<unsigned>(p.to.sizes[2] / Shape::kCols),
                    static_cast<unsigned>(p.from.sizes[0] * a.row_tiles));
  return fovea::cuda::launch<few_rows_kernel<Shape>>(
      {blocks, Shape::kThreads + 32, sizeof(typename Shape::Shared), stream}, a);
}

template <typename T>
cudaError_t launch_type(const FewRows& p, cudaStream_t stream) {
  return p.gradient ? launch_shape<FewRowsShape<T, true>>(p, stream)
                    : launch_shape<FewRowsShape<T, false>>(p, stream);
}

}  // namespace

bool takes_few_rows(const FewRows& p) {
  if (p.from.rank != 3 || p.to.rank != 3 || dtype_bytes(p.from.dtype) != 2) return false;
  const int64_t depth = p.from.sizes[2], cols = p.to.sizes[2];
  if (depth % tile::kPanelColumns != 0 || depth > kMostDepth || cols % kFewRowsTile != 0) {
    return false;
  }
  for (const TensorView& t : {p.from, p.weight, p.to}) {
    if (!fovea::cuda::hopper::takes_map(with_heads(t))) return false;
  }
  return device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
         device_attribute(cudaDevAttrComputeCapabilityMinor) == 0 && is_small(p);
}

cudaError_t launch_few_rows(const FewRows& p, cudaStream_t stream) {
  return p.from.dtype == DType::kF16 ? launch_type<__half>(p, stream)
                                     : launch_type<__nv_bfloat16>(p, stream);
}

}  // namespace fovea::layers::cuda
